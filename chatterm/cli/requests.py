"""The lines of a batch: parsing its requests and formatting its results."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from typing import Any, BinaryIO, Literal, cast, get_args, get_type_hints

from chatterm.backends.backend import EngineError, Message, Outcome, Request, ThinkMode
from chatterm.cli.constraints import constraint_from_format
from chatterm.cli.oneshot import answer_json
from chatterm.settings.settings import SamplingSettings

LINE_LIMIT = 16 * 1024 * 1024
"""The longest line read, in bytes: far beyond any model's context."""
_NUMBERS = {
    name: int in get_args(kind)
    for name, kind in get_type_hints(SamplingSettings).items()
    if name not in ("stop", "speculation", "stop_repetition")
}
"""Numeric sampling fields, and whether they are whole numbers."""
_FIELDS = (
    *("prompt", "messages", "id", *_NUMBERS, "stop", "stop_repetition", "speculation", "think"),
    "response_format",
)
_THINK: Mapping[Any, ThinkMode] = {True: "on", False: "off", "on": "on", "off": "off", "auto": "auto"}


class LineError(Exception):
    """A line that is not a valid request. The message is one line."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of the input that is not blank."""

    number: int
    """The line number, from 1, counting blank lines."""
    data: bytes | None
    """None if the line is too long."""
    digest: str
    """A hash of the line and the settings of the batch, by which a result is matched to it."""
    end: int
    """Where the line ends, in bytes of the input."""


def read_lines(stream: BinaryIO, settings: bytes) -> Iterator[InputLine]:
    """Yield the lines of `stream`, reading them as needed. Raises EngineError if it cannot be read."""
    number = end = 0
    while True:
        data = _line(stream)
        if not data:
            return
        number, end = number + 1, end + len(data)
        found = sha256(settings)
        kept: bytes | None = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
        found.update(data.strip())
        while len(data) > LINE_LIMIT and not data.endswith(b"\n"):
            kept = None
            data = _line(stream) or b"\n"
            end += len(data)
            found.update(data)
        if kept is None or kept.strip():
            yield InputLine(number, kept, found.hexdigest()[:16], end)


def _line(stream: BinaryIO) -> bytes:
    try:
        return stream.readline(LINE_LIMIT + 1)
    except OSError as error:
        raise EngineError(f"The requests cannot be read ({error.strerror or error}).") from error


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of a line, or what is wrong with it."""

    request: Request | None
    """None if it cannot be answered."""
    id: Any = None
    """The id that the line gives; None if it gives none."""
    problem: str = ""


def parse_request(line: InputLine) -> BatchRequest:
    """Parse a line into its request, or what is wrong with it."""
    id = None
    try:
        fields = _fields(line.data)
        id = fields.get("id")
        if not (id is None or (isinstance(id, str | int | float) and not isinstance(id, bool))) or (
            isinstance(id, float) and not isfinite(id)  # no JSON could give it back
        ):
            id = None
            raise LineError("id must be a string or a number.")
        return BatchRequest(_request(fields), id)
    except LineError as error:
        return BatchRequest(None, id, str(error))


def _fields(data: bytes | None) -> dict[str, Any]:
    if data is None:
        raise LineError(
            f"The line is longer than {LINE_LIMIT // (1024 * 1024)} MiB; that fits no model's context."
        )
    try:
        fields = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"The line is not UTF-8 text (byte {error.start + 1}).") from error
    except json.JSONDecodeError as error:
        raise LineError(f"The line is not JSON: {error.msg} at character {error.pos + 1}.") from error
    except (ValueError, RecursionError) as error:
        raise LineError(
            "The line cannot be read as JSON: it has a number that is too large or is nested too deeply."
        ) from error
    if not isinstance(fields, dict):
        raise LineError('The line must be an object like {"prompt": "..."}.')
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise LineError(f"Unknown field {unknown[:60]!r}; a request may have: {', '.join(_FIELDS)}.")
    return cast("dict[str, Any]", fields)


def _request(fields: dict[str, Any]) -> Request:
    if ("prompt" in fields) == ("messages" in fields):
        raise LineError('A request needs either "prompt" or "messages".')
    if "prompt" in fields:
        messages = [Message("user", _text(fields["prompt"], "prompt"))]
    else:
        messages = _messages(fields["messages"])
    sampling: dict[str, Any] = {}
    for name, whole in _NUMBERS.items():
        if fields.get(name) is not None:
            sampling[name] = _number(name, fields[name], whole=whole)
    if (detection := fields.get("stop_repetition")) is not None:
        if not isinstance(detection, bool):
            raise LineError("stop_repetition must be true or false.")
        sampling["stop_repetition"] = detection
    if fields.get("speculation") is not None:
        sampling["speculation"] = _text(fields["speculation"], "speculation")
    if fields.get("stop") is not None:
        stop = fields["stop"]
        texts = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [None]
        sampling["stop"] = tuple(_text(text, "stop", blank=True) for text in texts)
    think = fields.get("think")
    if think is not None and not (isinstance(think, bool | str) and think in _THINK):
        raise LineError('think must be true, false, "on", "off" or "auto".')
    from engine.params import SamplingParams

    try:
        if fields.get("response_format") is not None:
            sampling["constraint"] = constraint_from_format(fields["response_format"])
        SamplingParams(**sampling)
    except EngineError as error:
        raise LineError(str(error)) from error
    return Request(messages, sampling, None if think is None else _THINK[think])


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise LineError('messages must be a list like [{"role": "user", "content": "..."}].')
    messages = []
    for place, one in enumerate(given, 1):
        if not isinstance(one, dict) or set(one) != {"role", "content"}:
            raise LineError(f'Message {place} must have "role" and "content", and nothing else.')
        if one["role"] not in ("system", "user", "assistant"):
            raise LineError(f"The role of message {place} must be system, user or assistant.")
        role = cast("Literal['system', 'user', 'assistant']", one["role"])
        text = _text(one["content"], f"the content of message {place}", blank=role == "system")
        messages.append(Message(role, text))
    said = messages[1:] if messages[0].role == "system" else messages
    turns = [message.role for message in said]
    if (
        turns != ["user" if place % 2 == 0 else "assistant" for place in range(len(turns))]
        or len(turns) % 2 == 0
    ):
        raise LineError(
            "messages may begin with a system message; user and assistant must then alternate, and the "
            "last must be the user's."
        )
    return messages


def _text(value: Any, name: str, *, blank: bool = False) -> str:
    if not isinstance(value, str):
        raise LineError(f"{name} must be a string.")
    if not value.strip() and not blank:
        raise LineError(f"{name} is empty; add some text.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LineError(f"{name} contains half a character (a lone surrogate).") from error
    return value


def _number(name: str, value: Any, *, whole: bool) -> int | float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (whole and not isinstance(value, int))
    ):
        raise LineError(f"{name} must be a {'whole ' if whole else ''}number.")
    try:
        return value if whole else float(value)
    except OverflowError as error:
        raise LineError(f"{name} is too large.") from error


def result_line(line: InputLine, asked: BatchRequest, outcome: Outcome | str) -> bytes:
    """Format the result of a request, its answer or error, as one line of plain ASCII."""
    fields: dict[str, Any] = {"line": line.number, "request": line.digest}
    if asked.id is not None:
        fields["id"] = asked.id
    if isinstance(outcome, str):
        fields["error"] = outcome
    else:
        fields |= answer_json(outcome)
        if outcome.seed is not None:
            fields["seed"] = outcome.seed
    return json.dumps(fields).encode() + b"\n"
