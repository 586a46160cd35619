"""Reads an answer while it streams, for the parsers of tool calls: each waits wherever it needs more text to decide."""

import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from chatterm.tool_calls.literals import Call, Read, UnfinishedError

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
_LONGEST = 1_000_000
"""The most characters of a call that is read when it is complete."""
_MOST_READ = 5_000_000
"""The most characters that are read for one call: it is read again at each closing mark, which may be in a string."""


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
    is_calling: bool = False
    """Whether a call is awaited that is passed on when it is complete."""
    is_forced: bool = False
    """Whether the answer can only be calls."""
    is_cut: bool = False
    """Whether a limit or a stop string ended the answer."""
    lost_call: bool = False
    """Whether the beginning of a call was dropped because the answer was cut there."""
    _wants_more: bool = False
    """Whether the answer ended where more was needed to decide."""
    _blank: str = ""
    """Blanks after text; they are dropped where a call follows."""
    _after_call: bool = False
    """Whether only blanks have come since the latest call."""

    # -- these wait for text

    def more(self) -> Steps[bool]:
        """Wait for more text; return False at the end of the answer."""
        if not self.is_over:
            yield
        self._wants_more = self.is_over
        return not self.is_over

    def passage(self, marks: tuple[str, ...], call: bool = False) -> Steps[str]:
        """Pass on text (in an open `call`: arguments) up to one of `marks`; take and return the mark, "" at the end."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            at, mark = min(found) if found else (len(self.rest), "")
            if not found and (not self.is_over or self._drops_marks):
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

    def closing(self, mark: str) -> Steps[None]:
        """Take the mark that ends calls, which may be missing."""
        blank = yield from self.blanks()
        if (yield from self.follows(mark)):
            self.take(len(mark))
        elif self.is_cut and self._wants_more:
            self.lost_call, self.rest = self.lost_call or not mark.startswith(self.rest), ""
        else:
            self.text(blank)

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

    def call_list(self, lead: str) -> Steps[str]:
        """Take the calls of a list up to its end; `lead` is what was taken before it. Return what of that, and of the
        list, has turned out to be text."""
        started = lead
        lead += self.take(1)
        while True:
            lead += yield from self.blanks(",")
            if not (yield from self.follows("{")) or not (yield from self.call()):
                break
            lead = ""
        if (yield from self.follows("]")) and not (started and lead.startswith(started)):
            self.take(1)
            return ""
        return lead

    def marked(self, closing: str, read: Read) -> Steps[bool]:
        """Take the calls that `read` finds before `closing`, and `closing`. Return False if there are none: then
        nothing is taken."""
        self.is_calling = True
        calls = yield from self._before(closing, read)
        self.is_calling = False
        for name, arguments in calls:
            self.begin(name)
            self.arguments(arguments)
            self.close()
        return bool(calls)

    def _before(self, closing: str, read: Read) -> Steps[list[tuple[str, str]]]:
        at = total = 0
        while total < _MOST_READ:
            while (found := self.rest.find(closing, at)) < 0:
                at = max(at, len(self.rest) - len(closing) + 1)
                if at > _LONGEST or not (yield from self.more()):
                    return []
            if found > _LONGEST:
                return []
            total += found
            try:
                calls = [_in_json(call) for call in read(self.rest[:found])]
            except UnfinishedError:
                at = found + len(closing)
            except ValueError:
                return []
            else:
                self.take(found + len(closing))
                return calls
        return []

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
            self.no_call(left)

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

    @property
    def _drops_marks(self) -> bool:
        """Whether what may begin a mark at the end can be nothing else."""
        return self.is_cut and self.is_forced

    def no_call(self, text: str, is_certain: bool = True) -> None:
        """Pass on what has turned out to be text, though it began as a call.

        Drop it, and all that follows, if the answer was cut there and is certain to have become a call.
        """
        if self.is_cut and self._wants_more and (is_certain or self.is_forced):
            self.lost_call, self.rest = self.lost_call or bool(text or self.rest), ""
        else:
            self.verbatim(text)

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
        if self._drops_marks and not call:
            self.no_call("")
        else:
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


def _in_json(call: Call) -> tuple[str, str]:
    """Return a call with its arguments as JSON text. Raises ValueError for numbers that JSON does not have."""
    return call[0], json.dumps(call[1], ensure_ascii=False, allow_nan=False)


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
