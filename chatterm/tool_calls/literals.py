"""Reads calls that are not written in JSON: Python's (LFM2), Gemma 4's, and calls in tags (Seed-OSS, GLM).

What a model writes is data: nothing of it is evaluated, and its length and depth are limited.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

Call = tuple[str, dict[str, Any]]
"""The name of a function, and its arguments."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters of each function, by its name."""
Read = Callable[[str], list[Call]]
"""Reads the calls in a text; raises ValueError if it is something else, UnfinishedError if it ends within a string."""

_DEEPEST = 64
"""How many brackets may be open at a time."""
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,400})(?:\.\d{1,400})?(?:[eE][-+]?\d{1,4})?(?![\w.])", re.ASCII)
_KEY = re.compile(r"[^:{}\[\](),<>\"']{1,256}")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"[A-Za-z]{4,5}(?!\w)")
_BLANKS = re.compile(r"\s*")
_QUOTES = ('<|"|>', '"', "'")
_PLAIN = re.compile(r"[^\\][^\\'\"]*")
_AFTER_TEXT = re.compile(r"\s*(?:[,)\]}:]|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


class UnfinishedError(ValueError):
    """The text ends within a string."""


@dataclass(slots=True)
class Literals:
    """Reads literals from a text, one after the other. Its methods raise ValueError for anything else."""

    text: str
    at: int = 0
    """The index of the next character."""
    depth: int = 0

    def skips(self, mark: str) -> bool:
        """Skip blanks, and `mark` if it comes next; return whether it does."""
        self._blanks()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) if found else 0
        return found

    def expect(self, mark: str) -> None:
        """Skip blanks and `mark`, which has to come next."""
        if not self.skips(mark):
            raise ValueError(f"{mark} is missing")

    def end(self) -> None:
        """Check that only blanks are left."""
        self._blanks()
        if self.at < len(self.text):
            raise ValueError("more follows")

    def name(self) -> str:
        """Read the name of a function."""
        return self._matched(_NAME)

    def arguments(self, equals: str, closing: str) -> dict[str, Any]:
        """Read `key equals value` any number of times, with commas between them, up to and with `closing`."""
        found: dict[str, Any] = {}
        while not self.skips(closing):
            if found:
                self.expect(",")
                if self.skips(closing):
                    break
            key = self._quoted() if self._quote() else self._matched(_NAME if equals == "=" else _KEY).strip()
            if key in found:
                raise ValueError(f"{key} is given twice")
            self.expect(equals)
            found[key] = self.value()
        return found

    def value(self) -> Any:
        """Read a string, a number, a constant, a list or an object."""
        if self._quote():
            return self._quoted()
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError("nested too deeply")
        try:
            if self.skips("{"):
                return self.arguments(":", "}")
            for opening, closing in ("[]", "()"):
                if self.skips(opening):
                    return self._items(closing)
        finally:
            self.depth -= 1
        if (word := _WORD.match(self.text, self.at)) is not None and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        digits = self._matched(_NUMBER)
        return float(digits) if any(char in digits for char in ".eE") else int(digits)

    def _items(self, closing: str) -> list[Any]:
        found: list[Any] = []
        while not self.skips(closing):
            if found:
                self.expect(",")
                if self.skips(closing):
                    break
            found.append(self.value())
        return found

    def _quote(self) -> str:
        """Return the quotation mark that comes next; "" if none does."""
        self._blanks()
        return next((quote for quote in _QUOTES if self.text.startswith(quote, self.at)), "")

    def _quoted(self) -> str:
        quote = self._quote()
        start = self.at = self.at + len(quote)
        if len(quote) > 1:  # a token of its own, so nothing is escaped
            end = self.text.find(quote, start)
            if end < 0:
                raise UnfinishedError
            self.at = end + len(quote)
            return self.text[start:end]
        said: list[str] = []
        while (char := self.text[self.at : self.at + 1]) != quote or not self._ends_here():
            if not char:
                raise UnfinishedError
            if (plain := _PLAIN.match(self.text, self.at)) is not None:
                said.append(plain[0])
                self.at = plain.end()
            else:
                self.at += 1
                said.append(self._escaped())
        self.at += 1
        # JSON writes characters beyond U+FFFF as two escapes.
        return "".join(said).encode("utf-16", "surrogatepass").decode("utf-16")

    def _ends_here(self) -> bool:
        """Return whether a quotation mark here ends its string: templates write strings without escaping those."""
        return _AFTER_TEXT.match(self.text, self.at + 1) is not None

    def _escaped(self) -> str:
        """Read what follows a backslash."""
        char = self.text[self.at : self.at + 1]
        if not char:
            raise UnfinishedError
        self.at += 1
        if char not in _HEX:
            return _ESCAPES.get(char, char if char in "\\'\"/" else f"\\{char}")
        digits = self.text[self.at : self.at + _HEX[char]]
        self.at += len(digits)
        if len(digits) < _HEX[char]:
            raise UnfinishedError
        return chr(int(digits, 16))

    def _matched(self, pattern: re.Pattern[str]) -> str:
        self._blanks()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError("something else follows")
        self.at = found.end()
        return found[0]

    def _blanks(self) -> None:
        found = _BLANKS.match(self.text, self.at)
        self.at = found.end() if found is not None else self.at


def pythonic_calls(text: str) -> list[Call]:
    """Read `[f(a=1), g()]` or `f(a=1)`. Raises ValueError for anything else, UnfinishedError within a string."""
    reader = Literals(text)
    is_list, found = reader.skips("["), list[Call]()
    while not found or (is_list and reader.skips(",")):
        name = reader.name()
        reader.expect("(")
        found.append((name, reader.arguments("=", ")")))
    if is_list:
        reader.expect("]")
    reader.end()
    return found


def gemma_calls(text: str) -> list[Call]:
    """Read `call:NAME{key:value,...}`. Raises as `pythonic_calls` does."""
    reader = Literals(text)
    reader.expect("call:")
    name = reader.name()
    reader.expect("{")
    found = (name, reader.arguments(":", "}"))
    reader.end()
    return [found]


@dataclass(frozen=True, slots=True)
class Tags:
    """How a format writes a call in tags: `before name after (key_tag key after_key value after_value)* end`."""

    before: str
    after: str
    key: str
    after_key: re.Pattern[str]
    after_value: str
    end: str
    on_lines: bool = False
    """Whether a line break before a value and one after it are no part of it."""

    def calls(self, text: str, schemas: Schemas) -> list[Call]:
        """Read a call, or several where they have a tag, whose values get the types that their schemas want.

        Raises as `pythonic_calls` does.
        """
        reader, found = Literals(text), list[Call]()
        while not found or (self.before and reader.text[reader.at :].strip()):
            found.append(self._call(reader, schemas))
        reader.end()
        return found

    def _call(self, reader: Literals, schemas: Schemas) -> Call:
        text = reader.text
        reader.expect(self.before)
        name = reader.name()
        reader.expect(self.after)
        properties = schemas.get(name, {}).get("properties", {})
        found: dict[str, Any] = {}
        while reader.skips(self.key):
            between = self.after_key.search(text, reader.at)
            if between is None:
                raise ValueError("a key has no end")
            key = text[reader.at : between.start()].strip()
            end = text.find(self.after_value, between.end())
            if end < 0:
                raise UnfinishedError
            if key in found or "<" in key or '"' in key:
                raise ValueError(f"{key} is no key, or given twice")
            value = text[between.end() : end]
            if self.on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            found[key] = typed(value, properties.get(key, {}))
            reader.at = end + len(self.after_value)
        reader.expect(self.end)
        return name, found


SEED = Tags("<function=", ">", "<parameter=", re.compile(">"), "</parameter>", "</function>")
QWEN = replace(SEED, on_lines=True)
MUSE = Tags(
    '<atem:invoke name="',
    '">',
    '<atem:parameter name="',
    re.compile('">'),
    "</atem:parameter>",
    "</atem:invoke>",
)
GLM = Tags("", "", "<arg_key>", re.compile(r"</arg_key>\s*<arg_value>"), "</arg_value>", "")


def typed(text: str, schema: Any) -> Any:
    """Return the value that a text without quotes stands for, given its schema: the text itself where that is a
    string, otherwise what it is in JSON or in Python."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    for read in (json.loads, _literal):
        with suppress(ValueError, RecursionError):
            value = read(text)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return text if "string" in kinds and _kind(value) not in kinds else value
    return text


def _literal(text: str) -> Any:
    reader = Literals(text)
    found = reader.value()
    reader.end()
    return found


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    choices = [schema]
    for name in ("anyOf", "oneOf"):
        listed = schema.get(name)
        choices += [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    kinds = set[str]()
    for choice in choices:
        named, values = choice.get("type"), choice.get("enum")
        kinds.update(
            [named] if isinstance(named, str) else map(str, named) if isinstance(named, list) else ()
        )
        if named is None and isinstance(values, list):
            kinds.update(map(_kind, values))
    return kinds | ({"integer"} if "number" in kinds else set())


def _kind(value: Any) -> str:
    """Return the name that JSON schemas have for the type of a value."""
    kinds: dict[type, str] = {
        bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array",
    }  # fmt: skip
    return kinds.get(type(value), "null")
