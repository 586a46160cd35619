"""Finds the tool calls in an answer while it streams.

A parser takes the answer in pieces of any size and returns events. How the text is split makes no difference: the
events are the same once adjacent texts are joined. Nothing is lost: what turns out not to be a call comes out as text,
as it was written. Only blanks next to calls are dropped, as they belong to the format.

Arguments are passed on as they come, once the name of the function is known. Calls that are written in an unusual
order (arguments first) are passed on when they are complete.

Each format is a generator that reads through a `Reader` and waits wherever it needs more text to decide.
"""

import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from chatterm.tool_calls.constraint import ToolFormat

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Waits for more text at each `yield`."""

_HEAD = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\<>\s]{1,128})"\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
"""The usual beginning of a call, up to its arguments."""
_FIRST_KEY = re.compile(r'\{\s{0,64}"([^"\\]{0,64})"\s{0,64}:')
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=(?:functions\.)?([^\s<>]+)")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call of the function `name`; calls are numbered from 0."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments, which are JSON text."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is complete, or the answer was cut off in it."""

    number: int


Event = AnswerText | CallBegan | CallArguments | CallEnded


class Parser:
    """Parses an answer piece by piece into events. Call `push` any number of times, then `end` once."""

    def __init__(self, format: ToolFormat | None, tools: Collection[str]) -> None:
        """`tools`: the names of the functions that the model was given. Without them or a format, all is text."""
        self._reader = reader = Reader()
        if format is None or not tools:
            self._steps = _plain(reader)
        elif format == "hermes":
            self._steps = _hermes(reader)
        elif format == "llama3":
            self._steps = _llama3(reader, tools)
        elif format == "mistral":
            self._steps = _mistral(reader)
        else:
            self._steps = _harmony(reader)
        next(self._steps)

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        reader = self._reader
        reader.rest += text
        if text:
            next(self._steps)
        events, reader.events = reader.events, []
        return events

    def end(self) -> list[Event]:
        """End the answer; return the events that were held back."""
        self._reader.is_over = True
        next(self._steps, None)
        self._reader.finish()
        events, self._reader.events = self._reader.events, []
        return events


@dataclass(slots=True)
class JsonScanner:
    """Finds the end of a JSON object or list in pieces of text, by its brackets and strings alone."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """Return the index after the value's last bracket; None if it has not come yet."""
        for at in range(start, len(text)):
            char = text[at]
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif char == "\\":
                    self.escaped = True
                elif char == '"':
                    self.in_string = False
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        return None


@dataclass(slots=True)
class Reader:
    """The text not yet decided on, and the events so far."""

    rest: str = ""
    is_over: bool = False
    events: list[Event] = field(default_factory=list)
    calls: int = 0
    said: bool = False
    """Whether there was text."""
    _blank: str = ""
    """Blanks after text; they are dropped where a call follows."""
    _after_call: bool = False
    """Whether only blanks have come since the latest call."""

    # -- these wait for text

    def more(self) -> Steps[bool]:
        """Wait for more text; return False at the end of the answer."""
        if not self.is_over:
            yield
        return not self.is_over

    def passage(self, marks: tuple[str, ...], call: bool = False) -> Steps[str]:
        """Pass on text (in an open `call`: arguments) up to one of `marks`; take and return the mark, "" at the end."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            at, mark = min(found) if found else (len(self.rest), "")
            if not found and not self.is_over:
                at -= max((_overlap(self.rest, mark) for mark in marks), default=0)
            (self.arguments if call else self.text)(self.take(at))
            if found or not (yield from self.more()):
                return self.take(len(mark)) if found else self._leave(call)

    def blanks(self, also: str = "") -> Steps[str]:
        """Take the blanks, and characters of `also`, that come next."""
        return (yield from self.run(frozenset(" \t\r\n" + also)))

    def run(self, chars: frozenset[str]) -> Steps[str]:
        """Take the run of these characters that comes next."""
        taken = ""
        while True:
            size = next((at for at, char in enumerate(self.rest) if char not in chars), len(self.rest))
            taken += self.take(size)
            if self.rest or not (yield from self.more()):
                return taken

    def follows(self, mark: str) -> Steps[bool]:
        """Return whether `mark` comes next, without taking it."""
        while len(self.rest) < len(mark) and mark.startswith(self.rest):
            if not (yield from self.more()):
                return False
        return self.rest.startswith(mark)

    def found(self, mark: str) -> Steps[str | None]:
        """Take the text before `mark`, and `mark`; return the text, or None, taking nothing, if `mark` never comes."""
        while (at := self.rest.find(mark)) < 0:
            if not (yield from self.more()):
                return None
        before = self.take(at)
        self.take(len(mark))
        return before

    def value(self) -> Steps[None]:
        """Pass on the object that comes next as arguments."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self.rest)
            self.arguments(self.take(len(self.rest) if end is None else end))
            if end is not None or not (yield from self.more()):
                return

    def call(self, tools: Collection[str] | None = None) -> Steps[bool]:
        """Take an object that is a call (of one of `tools`). Return False if it is none: then nothing is taken."""
        scanner, seen = JsonScanner(), 0
        while True:
            if (head := _HEAD.match(self.rest)) is not None:
                if tools is not None and head[1] not in tools:
                    return False
                self.take(head.end())
                self.begin(head[1])
                yield from self.value()
                yield from self._members()
                return True
            first = _FIRST_KEY.match(self.rest)
            if first is not None and first[1] not in _KEYS:
                return False
            end = scanner.scan(self.rest, seen)
            seen = len(self.rest)
            if end is not None:
                call = whole_call(self.rest[:end])
                if call is None or (tools is not None and call[0] not in tools):
                    return False
                self.take(end)
                self.begin(call[0])
                self.arguments(call[1])
                self.close()
                return True
            if not (yield from self.more()):
                return False

    def _members(self) -> Steps[None]:
        """Read the rest of a call's object after its arguments: drop other members, pass anything else on as text."""
        scanner, seen = JsonScanner(depth=1), 0
        while (end := scanner.scan(self.rest, seen)) is None:
            seen = len(self.rest)
            if not (yield from self.more()):
                break
        left = self.take(end if end is not None else len(self.rest))
        self.close()
        if left.strip() != "}" and (end is None or not _is_json(f'{{"":0{left}')):
            self.verbatim(left)

    # -- these do not

    def take(self, count: int) -> str:
        """Take `count` characters."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def text(self, text: str) -> None:
        """Pass on more of the answer; hold back blanks at its end."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        whole = self._blank + text
        kept = whole.rstrip()
        self._blank = whole[len(kept) :]
        self.verbatim(kept, blank="")

    def verbatim(self, text: str, blank: str | None = None) -> None:
        """Pass on text unchanged, with the blanks held back before it."""
        if blank is None and text:
            text, self._blank = self._blank + text, ""
        if text:
            self.events.append(AnswerText(text))
            self.said, self._after_call = True, False

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._blank = ""
        self.events.append(CallBegan(self.calls, name))

    def arguments(self, text: str) -> None:
        """Pass on more of the open call's arguments."""
        if text:
            self.events.append(CallArguments(self.calls, text))

    def close(self) -> None:
        """End the open call."""
        self.events.append(CallEnded(self.calls))
        self.calls += 1
        self._after_call = True

    def finish(self) -> None:
        """Pass on the blanks at the end as text, unless they follow a call."""
        if self._blank and not self._after_call:
            self.events.append(AnswerText(self._blank))
        self._blank = ""

    def _leave(self, call: bool) -> str:
        (self.arguments if call else self.text)(self.take(len(self.rest)))
        return ""


def whole_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of a complete call, in either order; None if it is not a call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    given = found.get("arguments", found.get("parameters", {}))
    if isinstance(given, str):
        return found["name"], given
    return (found["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def _plain(reader: Reader) -> Steps[None]:
    while True:
        reader.verbatim(reader.take(len(reader.rest)))
        yield


def _hermes(reader: Reader) -> Steps[None]:
    mark, closing = "<tool_call>", "</tool_call>"
    yield from reader.more()
    while (yield from reader.passage((mark,))):
        blank = yield from reader.blanks()
        if not (yield from reader.follows("{")) or not (yield from reader.call()):
            reader.verbatim(mark + blank)
            continue
        blank = yield from reader.blanks()
        if (yield from reader.follows(closing)):
            reader.take(len(closing))
        else:
            reader.text(blank)


def _llama3(reader: Reader, tools: Collection[str]) -> Steps[None]:
    """Parse calls that no token marks: they must come first, and each must name one of `tools`."""
    tag = "<|python_tag|>"
    yield from reader.more()
    lead = yield from reader.blanks()
    if (yield from reader.follows(tag)):
        lead += reader.take(len(tag))
        lead += yield from reader.blanks()
    while (yield from reader.follows("{")) and (yield from reader.call(tools)):
        lead = yield from reader.blanks(";,")
    if reader.calls and not lead.strip():
        reader.text(lead)
    elif not reader.calls or reader.rest:
        reader.verbatim(lead)
    yield from reader.passage(())


def _mistral(reader: Reader) -> Steps[None]:
    mark = "[TOOL_CALLS]"
    yield from reader.more()
    while (yield from reader.passage((mark,))):
        lead = mark + (yield from reader.blanks())
        if (yield from reader.follows("[")):
            lead += reader.take(1)
            while True:
                lead += yield from reader.blanks(",")
                if not (yield from reader.follows("{")) or not (yield from reader.call()):
                    break
                lead = ""
            if (yield from reader.follows("]")) and not lead.startswith(mark):
                reader.take(1)
            elif lead.strip(" \t\r\n,"):
                reader.verbatim(lead)
            continue
        name = yield from reader.run(_NAME)
        lead += name
        for part in ("[CALL_ID]", "[ARGS]"):
            if (yield from reader.follows(part)):
                lead += reader.take(len(part))
                lead += yield from reader.run(_NAME if part == "[CALL_ID]" else frozenset(" \t\r\n"))
        if name and (yield from reader.follows("{")):
            reader.begin(name)
            yield from reader.value()
            reader.close()
        else:
            reader.verbatim(lead)


def _harmony(reader: Reader) -> Steps[None]:
    yield from reader.more()
    begins = yield from reader.follows(" to=")  # of an answer whose prompt ends in <|start|>assistant
    while begins or (mark := (yield from reader.passage(("<|start|>", "<|channel|>", *_ENDS)))):
        if not begins and mark in _ENDS:
            continue
        header = yield from reader.found("<|message|>")
        if header is None:
            reader.verbatim("" if begins else mark)
            begins = False
            continue
        begins = False
        if (to := _RECIPIENT.search(header)) is not None:
            reader.begin(to[1])
            yield from reader.passage(_ENDS, call=True)
            reader.close()
        elif reader.said:
            reader.text("\n\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
