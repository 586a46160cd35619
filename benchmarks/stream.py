"""How much of the decode loop's speed reaches the user: the bare loop, `engine.stream()` and the chat screen.

    python benchmarks/stream.py --fake-step-us 450                 no GPU: a loop paced as if by one
    python benchmarks/stream.py --model Qwen/Qwen3-0.6B            a real engine, on a GPU

All three share one process and take turns, several times; medians and their ratios are printed. The chat screen is the
real one at 120 x 40, driven without a terminal: everything is drawn and encoded, and then discarded. Its rate runs from
the first token to the moment when the last one has been drawn.

The paced loop is the engine's, with the GPU replaced by a clock: step i+1 is queued behind step i, then the thread
waits for step i and turns its token into an event. If the host comes late, the clock is idle, as the GPU would be.
Here `--model` names the tokenizer; without it one is trained on the text.
"""

import argparse
import asyncio
import ctypes
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rivers import prose, section

if TYPE_CHECKING:
    from chatterm.app import ChatApp
    from chatterm.backends.local import LocalBackend
    from engine import Engine
    from models.text.tokenizer import Tokenizer

SIZE = (120, 40)
_PATIENCE = 120.0
"""Seconds after which an answer counts as missing."""
QUESTION = "Tell me about rivers, with lists, code and a table."
TEMPLATE = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}\
{% endif %}"""


# --- the text ---


def answer_ids(tokenizer: "Tokenizer", tokens: int, seed: int) -> list[int]:
    """Return `tokens` ids: a quarter of thinking if the tokenizer has marks for it, then Markdown of every kind."""
    rng = random.Random(seed)
    ids: list[int] = []
    if tokenizer.think_end is not None:
        thought = "\n\n".join(prose(rng, 6) for _ in range(tokens // 100))
        ids = tokenizer.encode(f"<think>\n{thought}")[: tokens // 4] + tokenizer.encode("\n</think>\n\n")
    number = 0
    while len(ids) < tokens - 1:
        number += 1
        ids += tokenizer.encode(section(rng, number) + "\n\n")
    return [*ids[: tokens - 1], min(tokenizer.stop_ids)]


def trained_tokenizer() -> "Tokenizer":
    """Train a byte-level BPE on texts like the answers."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

    from models.text.tokenizer import Tokenizer
    from models.text.tokenizer_parts import TokenizerParts

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([section(rng, n) for n in range(4)], trainer)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    stop = frozenset(token for token in [backend.token_to_id("<|im_end|>")] if token is not None)
    return Tokenizer(TokenizerParts(backend, {"eos_token": "<|im_end|>"}, stop, TEMPLATE))


# --- a clock instead of a GPU ---


@dataclass
class Pace:
    """Steps of a fixed length, queued behind each other."""

    step_s: float
    free_at: float = 0.0
    idle_s: float = 0.0
    """Time during which the clock had nothing to do."""
    late: list[float] = field(default_factory=list)
    """Seconds that the host lost at each return from a call that had released the interpreter lock."""

    def launch(self) -> float:
        """Queue a step; return when it will be done."""
        began = time.perf_counter()
        time.sleep(0)  # like the launch of a graph, this releases the interpreter lock and takes it again
        now = time.perf_counter()
        self.late.append(now - began)
        if self.free_at and began > self.free_at:
            self.idle_s += began - self.free_at
        self.free_at = max(self.free_at, began) + self.step_s
        return self.free_at

    def wait(self, done_at: float) -> None:
        began = time.perf_counter()
        if done_at > began:
            time.sleep(done_at - began)
        self.late.append(time.perf_counter() - max(done_at, began))


def sharp_timers() -> None:
    """Let this thread's sleeps end on time, not up to 50 us later. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)


def paced_engine(tokenizer: "Tokenizer", step_s: float) -> Any:
    """Return an engine whose network is a clock and whose answers are already written; everything else is real."""
    import torch

    from engine import Engine
    from engine.cache.rows import Rows
    from engine.events import Figures, FinishReason
    from engine.schedule.sequence import Priority, Sequence

    class PacedEngine(Engine):
        def __init__(self) -> None:
            self.model_name, self.device, self.dtype = "paced", torch.device("cpu"), torch.float32
            self.tokenizer = tokenizer
            self.generation_defaults = {}
            self.context_length = self.max_positions = 40_960
            self.vocab_size = tokenizer.vocab_size
            self.script: list[int] = []
            self.pace = Pace(step_s)
            self.thread_id = 0

        def new_pause(self) -> int:
            return 1

        def start(
            self,
            rows: Rows,
            params: Any,
            output: Any = None,
            earlier: Any = None,
            origin: int = 0,
            follow: Any = None,
        ) -> Sequence:
            sequence = Sequence(rows, Priority.PERSON, params, output or self.output(params))
            threading.Thread(target=self.generate, args=(sequence,), daemon=True).start()
            return sequence

        def submit(self, sequence: Sequence) -> None:
            sequence.finished.set()

        def pin(self, rows: Rows) -> None:
            """Do nothing, because there is no cache."""

        @property
        def on_loop_thread(self) -> bool:
            return False

        def close(self) -> None:
            pass

        def figures(self) -> Figures:
            return Figures("paced", "cpu", "float32", "none", 40_960, 10**9, 10**9, 16, 9, 0, 0, 0, 0)

        def bare(self, steps: int) -> float:
            """Return tokens/s of the loop alone, on a thread of its own as always."""
            took: list[float] = []

            def loop() -> None:
                sharp_timers()
                self.pace = pace = Pace(step_s)
                pending = pace.launch()
                began = time.perf_counter()
                for _ in range(steps):
                    following = pace.launch()
                    pace.wait(pending)
                    pending = following
                took.append(time.perf_counter() - began)

            thread = threading.Thread(target=loop)
            thread.start()
            thread.join()
            return steps / took[0]

        def generate(self, sequence: Sequence) -> None:
            sharp_timers()
            self.thread_id = threading.get_ident()
            self.pace = pace = Pace(step_s)
            sequence.admitted = time.perf_counter()
            pending = pace.launch()
            for token_id in self.script:
                following = pace.launch()
                pace.wait(pending)
                pending = following
                if self.took(sequence, token_id):
                    break
            sequence.finish_reason = sequence.finish_reason or FinishReason.CANCELLED
            sequence.finished.set()
            sequence.events.put(None)

        def took(self, sequence: Sequence, token_id: int) -> bool:
            """Do what the engine's loop does with a token; return whether it was the last one."""
            output, params = sequence.output, sequence.params
            assert output is not None
            assert params is not None
            sequence.last_token = time.perf_counter()
            sequence.first_token = sequence.first_token or sequence.last_token
            sequence.generated.append(token_id)
            sequence.rows.append(token_id)
            if token_id in tokenizer.stop_ids:
                sequence.finish_reason = FinishReason.EOS
                sequence.events.put(output.end(token_id))
                return True
            event = output.push(token_id)
            if len(sequence.generated) == params.max_tokens:
                sequence.finish_reason = FinishReason.LENGTH
            sequence.events.put(event)
            return sequence.cancelled or sequence.finish_reason is not None

    return PacedEngine()


# --- the measurements ---


def cpu_seconds(thread_id: int) -> float:
    """Return the CPU time of a running thread; nan if the system does not tell."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread_id))
    except (AttributeError, OSError):
        return float("nan")


def stream_rate(engine: "Engine", prompt: list[int], tokens: int) -> float:
    """Return tokens/s as seen by code that iterates over `engine.stream()`."""
    from engine import SamplingParams

    stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
    next(stream)
    began, count = time.perf_counter(), 0
    for _ in stream:
        count += 1
    return count / (time.perf_counter() - began)


@dataclass
class Screen:
    """One answer on the chat screen."""

    rate: float
    """Tokens/s from the first token to the last one drawn."""
    loop_rate: float
    """Tokens/s by the engine's own clock."""
    ui_share: float
    """CPU time of the screen's thread per second of answer."""
    frames: int
    shown: str
    said: str


async def screen_rate(app: "ChatApp", backend: "LocalBackend") -> Screen:
    """Send a question to the running application and wait for the whole answer."""
    from chatterm.conversation.entries import AnswerEntry
    from chatterm.widgets.composer import Composer
    from chatterm.widgets.transcript import Transcript

    chat, frames = app.chat, 0
    begun, ended_at = False, 0.0
    transcript = chat.query_one(Transcript)

    def displayed() -> None:
        nonlocal frames, begun, ended_at
        frames += 1
        begun = begun or not chat.is_idle  # a frame may come before the question
        if begun and chat.is_idle and not ended_at:
            ended_at = time.perf_counter()

    ui = threading.get_ident()
    app.post_display_hook = displayed  # type: ignore[method-assign]
    busy, began = cpu_seconds(ui), time.perf_counter()
    composer = chat.query_one(Composer)
    composer.post_message(Composer.Submitted(QUESTION))
    while not ended_at and time.perf_counter() < began + _PATIENCE:
        await asyncio.sleep(0.05)
    busy = cpu_seconds(ui) - busy
    assert backend.chat is not None
    last = backend.chat.last
    assert last is not None
    stats = last.stats
    entry = [e for e in transcript.entries if isinstance(e, AnswerEntry)][-1]
    seen = ended_at - began - stats.ttft_s
    return Screen(
        rate=(stats.generated_tokens - 1) / seen,
        loop_rate=stats.decode_tokens_per_s,
        ui_share=busy / (ended_at - began),
        frames=frames,
        shown="".join(entry.source),
        said=last.text,
    )


def chat_backend(engine: "Engine", tokens: int) -> "LocalBackend":
    """Return the backend of the chat screen for an existing engine."""
    from chatterm.backends.backend import ChatOptions, ModelInfo
    from chatterm.backends.local import LocalBackend
    from engine import SamplingParams

    class Backend(LocalBackend):
        def open(self, on_progress: object = None) -> None:
            self.engine, self.chat = engine, engine.chat()
            self._params = SamplingParams(temperature=0.0, max_tokens=tokens)
            name, device = engine.model_name, str(engine.device)
            self.info = ModelInfo(name, device, str(engine.dtype), engine.context_length, self.chat.thinks)

        def close(self) -> None:
            """Do nothing: the engine is measured again."""

    return Backend(engine.model_name, ChatOptions())


async def on_screen(engine: "Engine", tokens: int) -> Screen:
    """Open the application, ask once, and leave."""
    from textual.drivers.headless_driver import HeadlessDriver

    from chatterm.app import ChatApp

    class Sink(HeadlessDriver):
        """A terminal that takes everything and shows nothing."""

        is_headless = False

    backend = chat_backend(engine, tokens)
    app = ChatApp(backend, theme="graphite")
    app.driver_class = Sink
    async with app.run_test(headless=False, size=SIZE):
        async with asyncio.timeout(_PATIENCE):
            while not app.chat.is_idle:
                await asyncio.sleep(0.05)
        result = await screen_rate(app, backend)
    app.worker.close()
    return result


@dataclass
class Repeats:
    """The figures of every repeat, side by side."""

    bare: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    screen: list[float] = field(default_factory=list)
    screen_loop: list[float] = field(default_factory=list)
    ui_share: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    longest_wait_ms: list[float] = field(default_factory=list)
    idle_share: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return medians, and ratios to the bare loop."""
        found = {name: statistics.median(values) for name, values in vars(self).items() if values}
        for name in ("stream", "screen", "screen_loop"):
            pairs = zip(getattr(self, name), self.bare, strict=True)
            found[f"{name}_ratio"] = statistics.median(rate / bare for rate, bare in pairs)
        return found


def measure(
    engine: "Engine", tokens: int, repeats: int, bare: Callable[[], float], before: Callable[[int], None]
) -> Repeats:
    """Measure all three in turn, `repeats` times, after one round that is discarded."""
    found = Repeats()
    prompt = engine.tokenizer.encode(QUESTION)
    for number in range(repeats + 1):
        before(number)
        rate, streamed = bare(), stream_rate(engine, prompt, tokens)
        shown = asyncio.run(on_screen(engine, tokens))
        if shown.shown != shown.said:
            raise SystemExit("What the screen was given is not what the engine said.")
        if number == 0:
            continue
        found.bare.append(rate)
        found.stream.append(streamed)
        found.screen.append(shown.rate)
        found.screen_loop.append(shown.loop_rate)
        found.ui_share.append(shown.ui_share)
        found.frames.append(shown.frames)
        pace = getattr(engine, "pace", None)
        if pace is not None:
            found.longest_wait_ms.append(max(pace.late) * 1e3)
            found.idle_share.append(pace.idle_s * shown.loop_rate / tokens)
    return found


def load(arguments: argparse.Namespace) -> Iterator[Any]:
    """Provide the engine, a function that times its bare loop, and one to call before each repeat."""
    tokens = arguments.tokens
    if arguments.fake_step_us:
        from models.text.tokenizer import load_tokenizer

        if arguments.model is None:
            tokenizer = trained_tokenizer()
        else:
            from models.files import ModelFiles
            from models.hub.sources import resolve

            folder = Path(arguments.model)
            has_one = (folder / "tokenizer.json").is_file()  # a tokenizer without a model suffices here
            files = ModelFiles(arguments.model, folder=folder) if has_one else resolve(arguments.model)
            tokenizer = load_tokenizer(files)
        engine = paced_engine(tokenizer, arguments.fake_step_us * 1e-6)

        def script(number: int) -> None:
            engine.script = answer_ids(tokenizer, tokens, number)

        yield engine
        yield lambda: engine.bare(min(tokens, 2000))
        yield script
        return
    from benchmarks.stepping import bare_seconds
    from engine import Engine

    engine = Engine.load(arguments.model, device=arguments.device)
    yield engine
    yield lambda: 1 / bare_seconds(engine, tokens // 2, min(tokens, 512))
    yield lambda number: None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="name, folder or file; with --fake-step-us only its tokenizer is used"
    )
    parser.add_argument("--fake-step-us", type=float, help="microseconds of a step of the paced loop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.fake_step_us:
        parser.error("say --model NAME, or --fake-step-us 450")
    from engine.errors import EngineError

    engine, bare, before = load(arguments)
    try:
        found = measure(engine, arguments.tokens, arguments.repeats, bare, before)
    except EngineError as error:
        raise SystemExit(str(error)) from None
    engine.close()
    summary = found.summary()
    about = f"{engine.model_name} on {engine.device}" if not arguments.fake_step_us else "paced loop"
    print(
        f"{about}, {os.cpu_count()} cores; answers of {arguments.tokens:,} tokens, {arguments.repeats} repeats"
    )
    print(f"{'':<24}{'tokens/s':>10}{'of bare':>9}")
    print(f"{'bare loop':<24}{summary['bare']:>10.1f}")
    print(f"{'engine.stream()':<24}{summary['stream']:>10.1f}{summary['stream_ratio']:>9.1%}")
    print(f"{'chat screen':<24}{summary['screen']:>10.1f}{summary['screen_ratio']:>9.1%}")
    print(f"{'  its loop alone':<24}{summary['screen_loop']:>10.1f}{summary['screen_loop_ratio']:>9.1%}")
    print(f"screen's thread: {summary['ui_share']:.0%} of a core, {summary['frames']:.0f} frames an answer")
    if "idle_share" in summary:
        print(f"longest the loop waited for the interpreter: {summary['longest_wait_ms']:.1f} ms")
        print(f"time in which a GPU would have idled: {summary['idle_share']:.1%}")
    if arguments.json:
        figures = {
            "about": about,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("torch", "textual", "tokenizers")},
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
            "medians": summary,
            "repeats": vars(found),
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
