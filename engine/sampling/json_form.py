"""How JSON that has to match a schema is written, as llguidance is told."""

import re
from typing import Any

_CONTROL = re.compile(r"\\u00[017]|\\x")
"""A control character in a schema, or in an expression of one."""


def json_form(schema: str) -> dict[str, Any]:
    r"""Return the options for a schema, given as JSON text.

    No `\u` where it can be missed: the library takes `"\u0061"` for another name than `"a"`, so a property written like
    that would escape its schema.
    """
    return {
        # One line, as json.dumps writes it: fixed text is forced, and a model cannot write blanks for ever.
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "json_allowed_escapes": '"\\bfnrt' + ("u" if _CONTROL.search(schema) else ""),
    }
