"""Text from outside (typed, pasted, generated, model names, errors) made safe for a terminal. Pure functions."""

import re

# A whole escape sequence: CSI, then the string sequences (DCS, SOS, OSC, PM, APC) up to their terminator, then
# the short ones. The 8-bit forms are there too. A string that never ends stops at the end of its line.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# Marks that reorder text on the screen, so that it reads differently from what it is.
_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def _pictures() -> dict[int, str | None]:
    table: dict[int, str | None] = {code: chr(0x2400 + code) for code in range(0x20)}
    table[0x7F] = "\u2421"
    table |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
    table |= dict.fromkeys(map(ord, _BIDI), "\ufffd")
    table |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): None, 0x2028: "\n", 0x2029: "\n"}
    return table


_PICTURES = _pictures()
_DROPPED = _PICTURES | {
    code: None for code, shown in _PICTURES.items() if shown == "\ufffd" or code < 0x20 or code == 0x7F
}
_DROPPED |= {ord("\n"): "\n", ord("\t"): "\t"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\u2028\u2029\ud800-\udfff]")


def is_safe(text: str) -> bool:
    """Return whether a terminal displays every character of `text` and obeys none of them."""
    return _UNSAFE.search(text) is None


def visible(text: str) -> str:
    """Replace control characters in generated text by pictures (`␛`), to show what the model wrote.

    This works on single characters: a sequence that streaming cuts in two is caught all the same.
    """
    if is_safe(text):
        return text
    return _SURROGATE.sub("\ufffd", text.translate(_PICTURES))


def cleaned(text: str) -> str:
    """Drop escape sequences and other control characters from typed or pasted text; line ends become `\\n`."""
    if is_safe(text):
        return text
    text = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _SURROGATE.sub("\ufffd", text.translate(_DROPPED))


def one_line(text: str, limit: int = 500) -> str:
    """Clean a name or a message like `cleaned`, and put it on one line of at most `limit` characters."""
    text = " ".join(cleaned(text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
