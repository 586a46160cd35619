"""Finds the tool calls in an answer while it streams.

A parser takes the answer in pieces of any size and returns events. How the text is split makes no difference: the
events are the same once adjacent texts are joined. Nothing is lost: what turns out not to be a call comes out as text,
as it was written. Only blanks next to calls are dropped, as they belong to the format.

Arguments in JSON are passed on as they come, once the name of the function is known. Calls that are written in an
unusual order (arguments first) or not in JSON are passed on when they are complete.

Each format is a generator that reads through a `Reader` and waits wherever it needs more text to decide.
"""

import re
from collections.abc import Collection
from functools import partial

from chatterm.tool_calls.constraint import ToolFormat
from chatterm.tool_calls.literals import GLM, MUSE, QWEN, SEED, Read, Schemas, gemma_calls, pythonic_calls
from chatterm.tool_calls.reader import Event, Reader, Steps

_RECIPIENT = re.compile(r"(?:^|[\s>])to=(?:functions\.)?([^\s<>]+)")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class Parser:
    """Parses an answer piece by piece into events. Call `push` any number of times, then `end` once."""

    def __init__(self, format: ToolFormat | None, tools: Schemas, is_forced: bool = False) -> None:
        """`tools`: the functions that the model was given. Without them or a format, all is text.

        `is_forced`: the answer can only be calls.
        """
        self._reader = reader = Reader(is_forced=is_forced)
        if format is None or not tools:
            self._steps = _plain(reader)
        else:
            match format:
                case "hermes":
                    self._steps = _hermes(reader)
                case "llama3":
                    self._steps = _llama3(reader, tools)
                case "mistral" | "ministral":
                    self._steps = _mistral(reader)
                case "hunyuan":
                    self._steps = _hunyuan(reader)
                case "harmony":
                    self._steps = _harmony(reader)
                case "gemma4":
                    self._steps = _marked(reader, "<|tool_call>", "<tool_call|>", gemma_calls)
                case "pythonic":
                    self._steps = _marked(reader, "<|tool_call_start|>", "<|tool_call_end|>", pythonic_calls)
                case "seed":
                    read = partial(SEED.calls, schemas=tools)
                    self._steps = _marked(reader, "<seed:tool_call>", "</seed:tool_call>", read)
                case "qwen":
                    read = partial(QWEN.calls, schemas=tools)
                    self._steps = _marked(reader, "<tool_call>", "</tool_call>", read)
                case "glm":
                    read = partial(GLM.calls, schemas=tools)
                    self._steps = _marked(reader, "<tool_call>", "</tool_call>", read)
                case "muse":
                    self._steps = _muse(reader, partial(MUSE.calls, schemas=tools))
        next(self._steps)

    @property
    def is_calling(self) -> bool:
        """Whether text is held back that may become a call."""
        return self._reader.is_calling

    @property
    def lost_call(self) -> bool:
        """Whether the beginning of a call was dropped at the end of an answer that was cut."""
        return self._reader.lost_call

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        reader = self._reader
        reader.rest += text
        if text:
            next(self._steps)
        events, reader.events = reader.events, []
        return events

    def end(self, is_cut: bool = False) -> list[Event]:
        """End the answer; return the events that were held back.

        `is_cut`: a limit or a stop string ended it. Then what was certain to become a call is dropped: it is no text.
        """
        self._reader.is_over, self._reader.is_cut = True, is_cut
        next(self._steps, None)
        self._reader.finish()
        events, self._reader.events = self._reader.events, []
        return events


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
            reader.no_call(mark + blank)
            continue
        yield from reader.closing(closing)


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
        reader.no_call(lead, is_certain=tag in lead)
    yield from reader.passage(())


def _mistral(reader: Reader) -> Steps[None]:
    mark = "[TOOL_CALLS]"
    yield from reader.more()
    while (yield from reader.passage((mark,))):
        lead = mark + (yield from reader.blanks())
        if (yield from reader.follows("[")):
            lead = yield from reader.call_list(lead)
            reader.no_call(lead if lead.strip(" \t\r\n,") else "")
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
            reader.no_call(lead)


def _hunyuan(reader: Reader) -> Steps[None]:
    mark, closing = "<tool_calls>", "</tool_calls>"
    yield from reader.more()
    while (yield from reader.passage((mark,))):
        lead = mark + (yield from reader.blanks())
        if (yield from reader.follows("[")):
            lead = yield from reader.call_list(lead)
        if lead.strip(" \t\r\n,"):
            reader.no_call(lead)
            continue
        yield from reader.closing(closing)


def _marked(reader: Reader, mark: str, closing: str, read: Read) -> Steps[None]:
    """Parse calls between two marks, which are passed on when they are complete."""
    yield from reader.more()
    while (yield from reader.passage((mark,))):
        if not (yield from reader.marked(closing, read)):
            reader.no_call(mark)


def _muse(reader: Reader, read: Read) -> Steps[None]:
    """Parse calls after the header of their message, which names the recipient."""
    mark, closing, opening = "<atem:function_calls>", "</atem:function_calls>", "<|message|>"
    yield from reader.more()
    header = ""
    if (yield from reader.follows(" to=")):
        if (named := (yield from reader.found(opening))) is None:
            reader.no_call("", is_certain=False)
        else:
            header = named + opening + (yield from reader.blanks())
        if header and not (yield from reader.follows(mark)):
            reader.no_call(header, is_certain=False)
            header = ""
    while (yield from reader.passage((mark,))):
        if not (yield from reader.marked(closing, read)):
            reader.no_call(header + mark)
        header = ""


def _harmony(reader: Reader) -> Steps[None]:
    yield from reader.more()
    begins = yield from reader.follows(" to=")  # of an answer whose prompt ends in <|start|>assistant
    while begins or (mark := (yield from reader.passage(("<|start|>", "<|channel|>", *_ENDS)))):
        if not begins and mark in _ENDS:
            continue
        header = yield from reader.found("<|message|>")
        if header is None:
            reader.no_call("" if begins else mark)
            begins = False
            continue
        begins = False
        if (to := _RECIPIENT.search(header)) is not None:
            reader.begin(to[1])
            yield from reader.passage(_ENDS, call=True)
            reader.close()
        elif reader.said:
            reader.text("\n\n")
