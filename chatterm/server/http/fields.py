"""Request bodies: the fields that an endpoint knows, and their conversion to typed structures.

A field that has no effect here is refused by name, never ignored, unless it is one that cannot change an answer.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from chatterm.server.service import RequestError

S = TypeVar("S", bound=msgspec.Struct)
TokenCount = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""How many tokens an answer may have."""

_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]*)`")
_TYPES = re.compile(r"\b(?:str|int|bool|float|object|array)\b")
_WORDS = {"str": "a string", "int": "an integer", "bool": "a boolean", "float": "a number"}
_WORDS |= {"object": "an object", "array": "an array"}
_JSON = msgspec.json.Decoder()


def wrong(param: str | None, message: str, code: str | None = None) -> RequestError:
    """Return the error for an invalid field of a request."""
    return RequestError(400, "invalid_request_error", message, param, code)


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """The fields of an endpoint. Those of `known` are used; null means that a field is not given."""

    endpoint: str
    known: type[S]
    harmless: Mapping[str, Collection[Any] | None] = field(default_factory=dict)
    """Fields that are accepted without effect, with their allowed values; None: any."""
    refused: Collection[str] = ()
    """Fields of the API that are not supported."""

    def read(self, body: bytes) -> S:
        """Parse a JSON body. Raises RequestError 400 that names what is wrong."""
        return self.of(json_object(body))

    def of(self, given: Mapping[str, Any]) -> S:
        """Convert a decoded body, as `read` does."""
        used = self.known.__struct_fields__
        taken = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in used:
                taken[name] = value
            elif name in self.harmless:
                allowed = self.harmless[name]
                if allowed is not None and not any(value is one or value == one for one in allowed):
                    choices = " or ".join(map(_shown, allowed))
                    raise wrong(name, f"{name} can only be {choices} here.", "unsupported_value")
            elif name in self.refused:
                raise wrong(
                    name, f"This server does not support {name}; leave it out.", "unsupported_parameter"
                )
            else:
                raise wrong(
                    _one_line(name)[:80],
                    f"{self.endpoint} has no field {_shown(name)}; leave it out.",
                    "unknown_parameter",
                )
        return convert(taken, self.known)


def json_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises RequestError 400."""
    try:
        found = _JSON.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(None, f"The body is not valid JSON: {_one_line(error)}.") from None
    except RecursionError:
        raise wrong(None, "The body is nested too deeply.") from None
    if not isinstance(found, dict):
        raise wrong(None, "The body must be a JSON object.")
    return found


def convert(given: Any, kind: type[S], place: str = "") -> S:
    """Convert decoded JSON to a structure. Raises RequestError 400 that names the field, which is within `place`."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), place) from None
    except RecursionError:
        raise wrong(place or None, "The body is nested too deeply.") from None


def _explained(text: str, place: str) -> RequestError:
    """Convert msgspec's error to the terms of this API."""
    found = _PLACE.search(text)
    parts = [place, found[1] if found else ""]
    text = _PLACE.sub("", text)
    if (named := _NAMED.search(text)) is not None:
        parts.append(named[1])
        said = " is missing." if "missing" in text else " is not a field of this API; leave it out."
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
