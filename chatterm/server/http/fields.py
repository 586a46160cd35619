"""Request bodies: the fields that an endpoint knows, and their conversion to typed structures.

A field that would change the answer elsewhere is refused by name. One that nobody knows, or whose value changes
nothing, is ignored and noted.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from chatterm.server.service import RequestError
from engine.sampling.expressible import expressible

S = TypeVar("S", bound=msgspec.Struct)
TokenCount = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""How many tokens an answer may have."""

MOST_NAMES = 20
"""Maximum names of ignored fields that are noted for one request."""
_NUMBER = re.compile(r"\[\d+\]")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"^Object missing required field `([^`]*)`")
_TYPES = re.compile(r"\b(?:str|int|bool|float|object|array)\b")
_WORDS = {"str": "a string", "int": "an integer", "bool": "a boolean", "float": "a number"}
_WORDS |= {"object": "an object", "array": "an array"}
_JSON = msgspec.json.Decoder()
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\(?:" + _PAIR + rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
"""Matches an escape of JSON; its group is half of a character beyond U+FFFF, without the other half."""


def wrong(param: str | None, message: str, code: str | None = None) -> RequestError:
    """Return the error for an invalid field of a request."""
    return RequestError(400, "invalid_request_error", message, param, code)


@dataclass(slots=True)
class Ignored:
    """The fields of a request that are ignored here, and the constraints of its schemas that are."""

    is_strict: bool = False
    """Whether the request is refused instead."""
    names: set[str] = field(default_factory=set)
    unenforced: set[str] = field(default_factory=set)
    """Constraints of its schemas that no grammar can express."""
    schema: Mapping[str, Any] | None = None
    """That of its answer, with these."""

    def express(self, schema: Mapping[str, Any]) -> Any:
        """Return a schema as far as a grammar can express it, and note what else it says."""
        if self.is_strict:
            return schema
        found, names = expressible(schema)
        self.unenforced |= names
        return found if isinstance(found, dict) else schema

    def add(self, name: str) -> None:
        """Note a field by its name, in which lists have no numbers. Raises RequestError 400 if this is strict."""
        name = _one_line(name)[:80]
        if self.is_strict:
            raise wrong(name, f"{name} has no effect here; leave it out.", "unknown_parameter")
        if len(self.names) < MOST_NAMES:
            self.names.add(name)


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """The fields of an endpoint. Those of `known` are used; null means that a field is not given."""

    known: type[S]
    refused: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """Fields of this API, or of servers with a similar one, that would change the answer: the values that do not."""
    place: str = ""
    """What names the object, with a dot, if it is part of a body."""

    def of(self, given: Mapping[str, Any], ignored: Ignored) -> S:
        """Convert a decoded body, and note what is ignored. Raises RequestError 400 that names what is wrong."""
        used = self.known.__struct_fields__
        taken = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in used:
                taken[name] = value
                continue
            allowed = self.refused.get(name)
            if allowed is not None and not any(value is one or value == one for one in allowed):
                if not allowed:
                    said = f"This server does not support {name}; leave it out."
                    raise wrong(f"{self.place}{name}", said, "unsupported_parameter")
                choices = " or ".join(map(_shown, allowed))
                raise wrong(f"{self.place}{name}", f"{name} can only be {choices} here.", "unsupported_value")
            ignored.add(f"{self.place}{name}")
        return convert(taken, self.known, self.place.removesuffix("."), ignored)


def json_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object, in which escapes of half a character become U+FFFD. Raises RequestError 400."""
    try:
        try:
            found = _JSON.decode(body)
        except msgspec.DecodeError:
            whole = _ESCAPE.sub(lambda one: b"\\ufffd" if one[1] else one[0], body)
            if whole == body:
                raise
            found = _JSON.decode(whole)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(None, f"The body is not valid JSON: {_one_line(error)}.") from None
    except RecursionError:
        raise wrong(None, "The body is nested too deeply.") from None
    if not isinstance(found, dict):
        raise wrong(None, "The body must be a JSON object.")
    return found


def convert(given: Any, kind: type[S], place: str, ignored: Ignored) -> S:
    """Convert decoded JSON to a structure, without the fields inside of it that nobody knows.

    Raises RequestError 400 that names the field, which is within `place`.
    """
    try:
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            known = _known(given, _type(kind), _NUMBER.sub("[]", place), ignored)
            return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), place) from None
    except RecursionError:
        raise wrong(place or None, "The body is nested too deeply.") from None


@cache
def _type(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _known(given: Any, kind: inspect.Type, place: str, ignored: Ignored) -> Any:
    """Return a value without the fields of its objects that their structures do not have."""
    if isinstance(kind, inspect.UnionType):
        wanted = inspect.StructType if isinstance(given, dict) else inspect.ListType
        kind = next((one for one in kind.types if isinstance(one, wanted)), kind)
    if isinstance(kind, inspect.ListType) and isinstance(given, list):
        return [_known(one, kind.item_type, f"{place}[]", ignored) for one in given]
    if not isinstance(kind, inspect.StructType) or not isinstance(given, dict):
        return given
    fields, lead = {field.name: field.type for field in kind.fields}, f"{place}." if place else ""
    for name in given.keys() - fields.keys():
        ignored.add(f"{lead}{name}")
    return {
        name: _known(value, fields[name], f"{lead}{name}", ignored)
        for name, value in given.items()
        if name in fields
    }


def _explained(text: str, place: str) -> RequestError:
    """Convert msgspec's error to the terms of this API."""
    found = _PLACE.search(text)
    parts = [place, found[1] if found else ""]
    text = _PLACE.sub("", text)
    if (named := _NAMED.search(text)) is not None:
        parts.append(named[1])
        said = " is missing."
    else:
        words = _TYPES.sub(
            lambda type: _WORDS.get(type[0], type[0]), text.replace("`", "").replace(" | null", "")
        )
        said = f": {words[:1].lower()}{words[1:]}."
    param = _one_line(".".join(filter(None, parts)).replace(".[", "["))[:80]
    return wrong(param or None, _one_line(f"{param or 'The body'}{said}"))


def _shown(value: object) -> str:
    return _one_line(msgspec.json.encode(value).decode())[:80]


def _one_line(value: object) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in str(value)).split())[:300]
