"""How much a chat template may build: checks made before the work, so that what is too much is never begun."""

import math
import re
from typing import Any

import jinja2

MAX_SIZE = 32 * 2**20
"""Characters of one text that a template may make; a list counts 32 for each item. No context holds as much."""
MAX_NUMBER = 100_000
"""The largest width, count or indent that a template may ask for; also the bits of the largest number."""

_TAKE_WIDTHS = {
    "batch", "center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "round", "slice",
    "tojson", "truncate", "urlize", "wordwrap", "zfill",
}  # fmt: skip
_WIDTH = re.compile(r"\d{6,}")


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or built too much."""


def check_size(size: int) -> None:
    """Raises TemplateLimitError for more than MAX_SIZE."""
    if size > MAX_SIZE:
        raise TemplateLimitError("it builds a text that is too large")


def size_of(value: Any) -> int:
    """What `value` counts towards MAX_SIZE, without what its items hold."""
    if isinstance(value, str):
        return len(value)
    return 32 * len(value) if isinstance(value, list | tuple | dict) else 0


def check_text(value: Any) -> None:
    """Refuse a value that is too large as text: a list may hold another one a thousand times over.

    Raises TemplateLimitError.
    """
    check_size(_text_size(value, {}))


def _text_size(value: Any, known: dict[int, int]) -> int:
    if not isinstance(value, list | tuple | dict):
        return size_of(value)
    # Counted once for each object, however often it occurs.
    if id(value) not in known:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = size_of(value) + sum(_text_size(item, known) for item in items)
    return known[id(value)]


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` where its result would be too large. Raises TemplateLimitError."""
    if operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}
        if bits.get(operator, 0) > MAX_NUMBER:
            raise TemplateLimitError("it computes with numbers that are too large")
    elif operator == "*":
        number = next((value for value in (left, right) if isinstance(value, int)), 0)
        check_size((size_of(left) + size_of(right)) * number)
    elif operator == "+":
        check_size(size_of(left) + size_of(right))


def check_arguments(name: str, values: list[Any]) -> None:
    """Refuse what would make the function or filter `name` build too much.

    `values` begins with what it works on, where there is such a thing. Raises TemplateLimitError.
    """
    if name in _TAKE_WIDTHS and any(_is_wide(value) for value in values[1:]):
        raise TemplateLimitError(f"it calls {name} with a number that is too large")
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    elif name in ("format", "format_map") and texts:
        _check_format(texts[0], values[1:])
    elif name == "join":
        check_text(values)
        check_size(math.prod(len(value) for value in values[:2] if isinstance(value, str | list | tuple)))


def _check_format(template: str, values: Any) -> None:
    values = list(values.values()) if isinstance(values, dict) else values
    values = values if isinstance(values, list | tuple) else [values]
    if _WIDTH.search(template) or ("*" in template and any(map(_is_wide, values))):
        raise TemplateLimitError("it formats to a width that is too large")
    check_text(values)
    fields = max(template.count("%"), template.count("{"))
    check_size(len(template) + fields * max(map(_text_length, values), default=0))


def _text_length(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(str(value)) if isinstance(value, list | dict) else 0


def _is_wide(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > MAX_NUMBER
