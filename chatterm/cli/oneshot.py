"""One conversation without a screen: answers on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from chatterm.backends.backend import (
    Backend,
    EngineError,
    Figures,
    FinishReason,
    Outcome,
    TokenEvent,
    TurnStats,
)
from chatterm.cli.progress import progress_on
from chatterm.cli.wait_notices import waits_told
from chatterm.conversation.figures import (
    decode_rate,
    guesses_text,
    has_gained,
    new_notes,
    rate_text,
    seconds_text,
    tokens_a_step,
    weights_text,
)
from chatterm.conversation.headless import Talk
from chatterm.terminal.sanitize import one_line, visible
from chatterm.terminal.spinner import Spinner, has_colour
from models.units import bytes_text, counted

if TYPE_CHECKING:
    from chatterm.cli.headless_tools import HeadlessTools
    from chatterm.sessions.store import SessionStore

REFUSED = 3
"""The exit code if a tool call was refused."""
MOST_ROUNDS = 50
"""The most rounds of tool calls for one prompt."""
INPUT_LIMIT = 64 * 1024 * 1024
"""The most bytes read from standard input: far beyond any model's context."""


class InputError(Exception):
    """Input that cannot be a prompt. The message is one line."""


def read_input(stream: BinaryIO) -> str:
    """Read a whole prompt from `stream` as UTF-8, without trailing line ends. Raises InputError."""
    data = stream.read(INPUT_LIMIT + 1)
    if len(data) > INPUT_LIMIT:
        limit = INPUT_LIMIT // (1024 * 1024)
        raise InputError(f"Standard input is larger than {limit} MiB; that fits no model's context.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"Standard input is not UTF-8 text (byte {data[error.start]:#04x} at offset {error.start}); "
            "convert it first, for example with iconv."
        ) from error
    return text.rstrip("\r\n")


def join_prompts(piped: str, prompts: Sequence[str], each: bool = False) -> list[str]:
    """Return the turns to send: piped text and a blank line go before the first prompt, or before `each`."""
    if not piped.strip():
        return list(prompts)
    if not prompts:
        return [piped]
    with_piped = [f"{piped}\n\n{prompt}" for prompt in prompts]
    return with_piped if each else [with_piped[0], *prompts[1:]]


def answer(
    backend: Backend,
    prompts: Sequence[str],
    *,
    as_json: bool = False,
    stats: bool = False,
    session: str | None = None,
    save: bool = False,
    sampling: Mapping[str, Any] | None = None,
    store: "SessionStore | None" = None,
    tools: "HeadlessTools | None" = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Load the model, send `prompts` as the turns of one conversation and write the answers as they are generated.

    With `session` they continue that session of `store` (default: the person's own), which is saved; `save` begins a
    new one, with `sampling` as its chosen sampling. The backend and the store are closed in the end. On
    KeyboardInterrupt the partial answer is kept (as JSON: written), and the interrupt is passed on. With `tools`, their
    calls are run. Returns the exit code. Raises ModelError and EngineError.
    """
    out = out or sys.stdout
    err = err or sys.stderr
    if (save or session is not None) and store is None:
        from chatterm.sessions.store import SessionStore

        store = SessionStore.open()
    try:
        talk = Talk(backend, store, session, sampling)
        with progress_on(err) as on_progress:
            backend.open(on_progress)
        if tools is not None:
            backend.configure({"tools": tools.session.box.offered()})
        talk.begin()
        said: set[str] = set()
        say_notes(backend, said, err)
        if stats and (figures := backend.figures()) is not None:
            write(err, start_line(figures) + "\n")
        for index, prompt in enumerate(prompts):
            if index and not as_json:
                write(out, "\n")
            _turn(backend, talk.ask(prompt), as_json=as_json, stats=stats, out=out, err=err)
            if tools is not None:
                _act(backend, talk, tools, as_json=as_json, stats=stats, out=out, err=err)
            say_notes(backend, said, err)
        if save and talk.saved.session is not None and err.isatty():
            write(err, _dim(f"Saved. To continue: chatterm run --session {talk.saved.session}", err) + "\n")
        return REFUSED if tools is not None and tools.refused else 0
    finally:
        if tools is not None:
            tools.close()
        backend.close()
        close_store(store, err)


UNSTOPPED = "; --no-stop-repetition lets it go on"


def close_store(store: "SessionStore | None", err: TextIO) -> None:
    """Write what is left of a session and close the store; report on `err` if that fails."""
    if store is not None and not store.close():
        write(err, f"chatterm: {one_line(store.farewell)}\n")


def say_beside(spinner: Spinner, err: TextIO, line: str) -> None:
    """Write a line to `err`, where a spinner may be running."""
    write(err, ("\r\x1b[K" if spinner.turns else "") + line + "\n")


def say_notes(backend: Backend, said: set[str], err: TextIO) -> None:
    for note in new_notes(backend.notes(), said):
        write(err, _dim(f"chatterm: {one_line(note, 400)}", err) + "\n")


def _act(backend: Backend, talk: Talk, tools: "HeadlessTools", **how: Any) -> None:
    """Run the tool calls of the answer and answer their results, for at most MOST_ROUNDS rounds."""
    err: TextIO = how["err"]
    for _ in range(MOST_ROUNDS):
        if not (calls := talk.tree.open_calls):
            return
        results = tools.results(calls, lambda line: write(err, _dim(one_line(line, 200), err) + "\n"))
        _turn(backend, talk.tell(results), **how)
    if talk.tree.open_calls:
        tools.refused = True
        write(
            err, f"chatterm: The model called tools {MOST_ROUNDS} times in a row; no further calls are run.\n"
        )


def _turn(
    backend: Backend,
    answering: Generator[TokenEvent, None, None],
    *,
    as_json: bool,
    stats: bool,
    out: TextIO,
    err: TextIO,
) -> None:
    page = AnswerWriter(out if not as_json else None, err)
    started = False
    try:
        with (
            Spinner(err, "Reading the prompt") as spinner,
            waits_told(backend, lambda line: say_beside(spinner, err, line)),
            closing(answering) as events,
        ):
            for event in events:
                started = True
                if event.text:
                    spinner.stop()
                page.write(event)
        page.end()
    except (KeyboardInterrupt, EngineError):
        page.end()
        if as_json and started and backend.last is not None:
            write(out, to_json(backend.last) + "\n")
        raise
    outcome = backend.last
    if outcome is None:
        return
    if as_json:
        write(out, to_json(outcome) + "\n")
    if outcome.finish_reason is FinishReason.CONTEXT_FULL:
        write(err, "chatterm: The context is full, so the answer ends here; a larger --context may help.\n")
    if outcome.finish_reason is FinishReason.LENGTH:
        write(err, "chatterm: The answer ends at the token limit (--max-tokens).\n")
    if outcome.finish_reason is FinishReason.REPETITION:
        write(err, f"chatterm: The answer was repeating itself and was stopped{UNSTOPPED}.\n")
    if stats:
        write(err, stats_line(outcome) + "\n")


class AnswerWriter:
    """Writes one answer as it comes: its text on `out`, its reasoning dim on `err` if that is a terminal."""

    def __init__(self, out: TextIO | None, err: TextIO | None) -> None:
        self._out = out
        self._err = err if err is not None and err.isatty() else None
        self._open: TextIO | None = None
        """The stream whose last line has no end yet; None if there is none."""

    def write(self, event: TokenEvent) -> None:
        if event.kind == "call":
            return
        stream = self._out if event.kind == "answer" else self._err
        if stream is None or not event.text:
            return
        if self._open is not stream:
            self.end()
        text = visible(event.text)
        write(stream, text if event.kind == "answer" else _dim(text, stream))
        self._open = None if text.endswith("\n") else stream

    def end(self) -> None:
        if self._open is not None:
            stream, self._open = self._open, None
            write(stream, "\n")


def _dim(text: str, stream: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[22m" if has_colour(stream) else text


def to_json(outcome: Outcome) -> str:
    """Format one answer as a JSON object on one line. Everything beyond printable ASCII is escaped."""
    return json.dumps(answer_json(outcome))


def answer_json(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of one answer, as `--json` prints it."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in outcome.calls]
    return {
        "text": outcome.text,
        "reasoning": outcome.reasoning,
        **({"calls": calls} if calls else {}),
        "finish_reason": str(outcome.finish_reason or FinishReason.CANCELLED),
        "stats": outcome.stats.to_dict(),
    }


def start_line(figures: Figures) -> str:
    """Return a line for people on a loaded model: device, kernels, weights, context and KV cache."""
    weights, kv = weights_text(figures), bytes_text(figures.kv_bytes)
    where = f"{visible(figures.model_name)} on {figures.device}, {figures.dtype}"
    how = f"{figures.attention} attention | decode: {figures.decode}"
    context = f"context {counted(figures.context_length, 'token')}"
    share = f" ({figures.kv_share:.0%} of the rest)" if figures.kv_share and figures.device != "cpu" else ""
    return f"[{where} | {how} | weights {weights} | {context}, KV cache {kv}{share}]"


def stats_line(outcome: Outcome) -> str:
    """Return a line for people with the figures of one answer."""
    stats = outcome.stats
    thought = f", {stats.reasoning_tokens} of them reasoning" if stats.reasoning_tokens else ""
    # A server may report nothing about the prompt, or not how much of it was cached.
    cached = f" ({stats.cached_tokens} cached)" if stats.split_tokens else ""
    prompt = f"prompt {counted(stats.prompt_tokens, 'token')}{cached}"
    rate = f" at {rate_text(tokens_per_s)}" if (tokens_per_s := decode_rate(stats)) else ""
    parts = (
        *([prompt] if stats.prompt_tokens else []),
        *([f"first token after {seconds_text(stats.ttft_s)}"] if stats.ttft_s else []),
        f"{counted(stats.generated_tokens, 'token')}{thought}{rate}",
        *([guesses_line(stats)] if has_gained(stats) else []),
        str(outcome.finish_reason or FinishReason.CANCELLED),
    )
    return f"[{' | '.join(parts)}]"


def guesses_line(stats: TurnStats) -> str:
    """Return a line for people: how many guessed tokens were right, the tokens per step, and the time saved."""
    a_step = tokens_a_step(stats.generated_tokens, stats.accepted_tokens)
    right = guesses_text(stats.guessed_tokens, stats.accepted_tokens)
    if 0 < stats.drafted_tokens < stats.guessed_tokens:
        right += f", {guesses_text(stats.drafted_tokens, stats.accepted_drafts)} of them"
    right += " by the draft model" if stats.drafted_tokens else ""
    return f"guessed right {right}, tokens per step {a_step:.2f}, saved {seconds_text(stats.saved_s)}"


def write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
