"""The options that tell llguidance how JSON that matches a schema is written."""

import re
from typing import Any

_CONTROL = re.compile(r"\\u00[017]|\\x")
"""Matches an escaped control character in a schema or in one of its expressions."""


def json_form(schema: str) -> dict[str, Any]:
    r"""Return the options for a schema, given as JSON text.

    They forbid `\u` where possible: the library takes `"\u0061"` for another name than `"a"`, so a property written
    like that would escape its schema.
    """
    return {
        # One line, as json.dumps writes it: fixed text is forced, and a model cannot write blanks endlessly.
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "json_allowed_escapes": '"\\bfnrt' + ("u" if _CONTROL.search(schema) else ""),
    }
