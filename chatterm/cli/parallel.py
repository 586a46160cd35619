"""`chatterm run --parallel` and `-n`: several answers at once, in the order of the prompts."""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import monotonic
from typing import TextIO

from chatterm.backends.arrivals import rate
from chatterm.backends.backend import Backend, FinishReason, Message, Outcome, Part, Request, TokenEvent
from chatterm.cli.oneshot import (
    UNSTOPPED,
    AnswerWriter,
    answer_json,
    say_beside,
    say_notes,
    start_line,
    stats_line,
    write,
)
from chatterm.cli.progress import progress_on
from chatterm.cli.wait_notices import waits_told
from chatterm.conversation.figures import rate_text, seconds_text
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.spinner import Spinner
from models.units import counted

_LABEL = 60
"""The most characters of a prompt in its label."""


@dataclass(slots=True)
class _PromptAnswer:
    """One requested answer, and the parts of it that came while earlier ones were being written."""

    prompt: str
    name: str
    number: int
    """The number of the answer to its prompt, from 1."""
    label: str
    """"" if there is only one answer."""
    parts: list[Part] = field(default_factory=list)


def answer_all(
    backend: Backend,
    prompts: Sequence[str],
    count: int = 1,
    *,
    names: Sequence[str] | None = None,
    seed: int | None = None,
    as_json: bool = False,
    stats: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Load the model, answer each prompt `count` times and write the answers in the order of the prompts.

    The first answer that is not complete is written as it comes. The answers to a prompt have the seeds `seed`,
    `seed` + 1, ... `names` are the labels of the prompts (default: their texts). An error of one prompt is reported in
    its place, and the exit code is then 1. The backend is closed in the end. Raises ModelError and EngineError for
    errors that concern all of them.
    """
    out, err = out or sys.stdout, err or sys.stderr
    asked = _asked(prompts, names or prompts, count)
    try:
        with progress_on(err) as on_progress:
            backend.open(on_progress)
        said: set[str] = set()
        say_notes(backend, said, err)
        if stats and (figures := backend.figures()) is not None:
            write(err, start_line(figures) + "\n")
        waits = not out.isatty()  # a spinner cannot share a terminal with the answers
        with Spinner(err, "Reading the prompts") as spinner:
            writer = _Writer(asked, out, err, spinner, as_json=as_json, stats=stats, waits=waits)
            with (
                waits_told(backend, lambda line: say_beside(spinner, err, line)),
                closing(backend.answers(_requests(asked, seed))) as parts,  # type: ignore[type-var]
            ):
                for index, part in parts:
                    writer.take(index, part)
        writer.end()
        say_notes(backend, said, err)
        return 1 if writer.failed else 0
    finally:
        backend.close()


def _asked(prompts: Sequence[str], names: Sequence[str], count: int) -> list[_PromptAnswer]:
    asked = []
    for prompt, name in zip(prompts, names, strict=True):
        title = one_line(name, _LABEL) if len(prompts) > 1 else ""
        for number in range(1, count + 1):
            which = f"{number} of {count}" if count > 1 else ""
            label = f"{title} ({which})" if title and which else title or which
            asked.append(_PromptAnswer(prompt, name, number, label))
    return asked


def _requests(asked: Sequence[_PromptAnswer], seed: int | None) -> list[Request]:
    return [
        Request((Message("user", one.prompt),), {} if seed is None else {"seed": seed + one.number - 1})
        for one in asked
    ]


class _Writer:
    """Writes answers in order, each as soon as those before it are complete."""

    def __init__(
        self,
        asked: list[_PromptAnswer],
        out: TextIO,
        err: TextIO,
        spinner: Spinner,
        *,
        as_json: bool,
        stats: bool,
        waits: bool,
    ) -> None:
        self._asked = asked
        self._out = out
        self._err = err
        self._spinner = spinner
        self._as_json = as_json
        self._stats = stats
        self._waits = waits
        self._page = AnswerWriter(None if as_json else out, None if waits else err)
        self._front = 0
        self._is_labelled = False
        self._done = self._tokens = self._generated = self._cut = self._looped = 0
        self._began = monotonic()
        self.failed = 0

    def take(self, index: int, part: Part) -> None:
        """Take one more part of an answer, and write what is next in order."""
        self._tokens += isinstance(part, TokenEvent)
        if isinstance(part, Outcome) and part.finish_reason is not None:
            self._done += 1
            self._generated += part.stats.generated_tokens
        self._done += isinstance(part, Exception)
        self._tell()
        if index != self._front:
            self._asked[index].parts.append(part)
            return
        is_whole = self._write(part)
        while is_whole:
            self._front += 1
            self._is_labelled = is_whole = False
            if self._front < len(self._asked):
                for held in self._asked[self._front].parts:
                    is_whole = self._write(held)
                self._asked[self._front].parts = []

    def end(self) -> None:
        """Write the summary, when all answers are done."""
        self._spinner.stop()
        if self._cut:
            cut = "1 answer ends" if self._cut == 1 else f"{self._cut:,} answers end"
            self._say(f"chatterm: {cut} at the token limit (--max-tokens).")
        if self._looped:
            looped = "1 answer was" if self._looped == 1 else f"{self._looped:,} answers were"
            self._say(f"chatterm: {looped} stopped because of repetition{UNSTOPPED}.")
        if self._stats:
            took = monotonic() - self._began
            tokens_per_s = rate(self._generated, took)
            at = f" at {rate_text(tokens_per_s)}" if tokens_per_s else ""
            parts = (
                counted(len(self._asked), "answer"),
                f"{counted(self._generated, 'token')}{at}",
                seconds_text(took),
            )
            write(self._err, f"[{' | '.join(parts)}]\n")

    def _tell(self) -> None:
        if self._tokens:
            done = f"{self._done:,} of {counted(len(self._asked), 'answer')}"
            tokens_per_s = rate(self._tokens, monotonic() - self._began)
            at = f" · {rate_text(tokens_per_s)}" if tokens_per_s else ""
            self._spinner.text = f"{done} · {counted(self._tokens, 'token')}{at}"

    def _write(self, part: Part) -> bool:
        """Write a part of the front answer; return whether it was the last."""
        one = self._asked[self._front]
        if isinstance(part, TokenEvent):
            if part.text and not self._as_json:
                self._label(one)
                self._page.write(part)
            return False
        if isinstance(part, Outcome):
            if part.finish_reason is None:
                return False
            self._ended(one, part)
            return True
        self.failed += 1
        if self._as_json:
            self._line({**_name(one), "error": str(part)})
        else:
            self._label(one)
            self._report(one, one_line(str(part)))
        return True

    def _ended(self, one: _PromptAnswer, outcome: Outcome) -> None:
        self._cut += outcome.finish_reason is FinishReason.LENGTH
        self._looped += outcome.finish_reason is FinishReason.REPETITION
        if self._as_json:
            seed = {"seed": outcome.seed} if outcome.seed is not None else {}
            self._line({**_name(one), **answer_json(outcome), **seed})
        else:
            self._label(one)
            self._page.end()
        if outcome.finish_reason is FinishReason.CONTEXT_FULL:
            where = f"{one.label}: " if one.label else ""
            write(
                self._err,
                f"chatterm: {where}The context is full, so the answer ends here; a larger --context may help.\n",
            )
        if self._stats:
            write(self._err, stats_line(outcome) + "\n")

    def _label(self, one: _PromptAnswer) -> None:
        if self._is_labelled:
            return
        self._is_labelled = True
        self._clear()
        if one.label:
            write(self._out, ("\n" if self._front else "") + f"==> {one.label} <==\n")

    def _line(self, fields: dict[str, object]) -> None:
        self._clear()
        write(self._out, json.dumps(fields) + "\n")

    def _report(self, one: _PromptAnswer, text: str) -> None:
        self._clear()
        self._say(f"chatterm: {one.label}: {text}" if one.label else f"chatterm: {text}")

    def _say(self, line: str) -> None:
        say_beside(self._spinner, self._err, line)

    def _clear(self) -> None:
        if not self._waits:
            self._spinner.stop()


def _name(one: _PromptAnswer) -> dict[str, object]:
    return {"prompt": one.name, "number": one.number}
