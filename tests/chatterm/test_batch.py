"""`chatterm batch`: every line of the input has one line of the output, in order, whatever happens."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import EngineError, FinishReason, Outcome, Part, Request, TokenEvent, TurnStats
from chatterm.cli.batch_run import Batch
from chatterm.cli.main import call
from chatterm.cli.requests import LINE_LIMIT, InputLine, parse_request, read_lines
from chatterm.cli.results import Results
from tests.chatterm.test_oneshot import Terminal
from tests.fresh import seeds


class Answering:
    """The part of Backend that a batch uses: answers `text` with `TEXT`, some at once and in any order."""

    info = None

    def __init__(self, seed: int = 0, at_once: int = 5) -> None:
        self.asked: list[str] = []
        self.most = 0
        self.calls: list[str] = []
        self._chance = random.Random(seed)
        self._at_once = at_once

    def open(self, on_progress: object = None) -> None:
        self.calls.append("open")

    def figures(self) -> None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.calls.append("close")

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        source, running = enumerate(requests), dict[int, str]()
        while True:
            while len(running) < self._at_once and (taken := next(source, None)) is not None:
                running[taken[0]] = taken[1].messages[-1].content
                self.asked.append(running[taken[0]])
            if not running:
                return
            index = self._chance.choice(list(running))
            text = running.pop(index)
            if text == "fails":
                yield index, EngineError("it does not fit")
                continue
            yield index, Outcome("", "", None, TurnStats())
            yield index, TokenEvent(text.upper(), 1, "answer")
            yield (
                index,
                Outcome(text.upper(), "", FinishReason.EOS, TurnStats(generated_tokens=1), [1], seed=9),
            )


def requests(*texts: str) -> bytes:
    return b"".join(json.dumps({"prompt": text, "id": text}).encode() + b"\n" for text in texts)


def run(
    source: bytes, path: Path, backend: Any = None, settings: bytes = b""
) -> tuple[list[dict[str, Any]], str]:
    """Run a batch; its results and what it said."""
    backend, err = backend or Answering(), io.StringIO()
    results = Results.open(str(path), io.BytesIO())
    try:
        Batch(backend, io.BytesIO(source), results, settings, err).answer()
    finally:
        results.close()
    return [json.loads(line) for line in path.read_text().splitlines()], err.getvalue()


@pytest.mark.parametrize("seed", seeds(3))
def test_results_stand_in_the_order_of_the_requests(seed: int, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(40)]
    results, said = run(requests(*texts), tmp_path / "o", Answering(seed))
    assert [(r["line"], r["id"], r["text"]) for r in results] == [
        (number, text, text.upper()) for number, text in enumerate(texts, 1)
    ]
    assert results[0]["finish_reason"] == "eos"
    assert results[0]["seed"] == 9
    assert said.startswith("40 requests, 0 errors, 40 tokens, ")


def test_no_line_is_lost_and_what_is_wrong_is_said_in_its_place(tmp_path: Path) -> None:
    source = (
        b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n[]\n' + requests("fails") + b'{"prompt": "b\\u0000", "id": 7}'
    )
    results, said = run(source, tmp_path / "o")
    assert [r["line"] for r in results] == [1, 4, 5, 6]
    assert [r.get("text") for r in results] == ["A", None, None, "B\0"]
    assert [r.get("error") for r in results][1:3] == [
        'The line must be an object like {"prompt": "..."}.',
        "it does not fit",
    ]
    assert [r.get("id") for r in results] == [None, None, "fails", 7]
    assert "4 requests, 2 errors, 2 tokens" in said


WRONG: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\x00\x00", "not JSON"),
    (b'{"prompt": "\x00"}', "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (b"[" * 100_000, "cannot be read as JSON"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    (b"3", "object"),
    (b"{}", "either"),
    (b'{"prompt": "a", "messages": []}', "either"),
    (b'{"prompt": 3}', "prompt must be a string"),
    (b'{"prompt": " "}', "prompt is empty"),
    (b'{"prompt": "\\ud800"}', "half a character"),
    (b'{"prompt": "a", "n": 2}', "Unknown field 'n'"),
    (b'{"prompt": "a", "id": [1]}', "id must"),
    (b'{"prompt": "a", "id": true}', "id must"),
    (b'{"prompt": "a", "id": NaN}', "id must"),
    (b'{"prompt": "a", "id": -1e400}', "id must"),
    (b'{"prompt": "a", "temperature": Infinity}', "temperature is inf; it must be a finite number"),
    (b'{"prompt": "a", "min_p": 1e400}', "min_p is inf; it must be from 0 to 1"),
    (b'{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
    (b'{"prompt": "a", "temperature": true}', "temperature must be a number"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    (b'{"prompt": "a", "temperature": -1}', "temperature is -1"),
    (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature is too large"),
    (b'{"prompt": "a", "top_k": 1.5}', "top_k must be a whole number"),
    (b'{"prompt": "a", "top_k": 1' + b"0" * 30 + b"}", "top_k is 1"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    (b'{"prompt": "a", "stop": 3}', "stop must be a string"),
    (b'{"prompt": "a", "stop": ["x", ""]}', "stop is ['x', '']; it must be"),
    (b'{"prompt": "a", "think": "maybe"}', "think must be"),
    (b'{"prompt": "a", "think": 1.0}', "think must be"),
    (b'{"messages": []}', "messages must be a list"),
    (b'{"messages": ["a"]}', "Message 1 must have"),
    (b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "Message 1 must have"),
    (b'{"messages": [{"role": "tool", "content": "a"}]}', "role of message 1"),
    (b'{"messages": [{"role": [], "content": "a"}]}', "role of message 1"),
    (b'{"messages": [{"role": "user", "content": ["a"]}]}', "content of message 1 must be a string"),
    (b'{"messages": [{"role": "system", "content": "a"}]}', "must then alternate"),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "must then alternate",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        "must then alternate",
    ),
]


@pytest.mark.parametrize(("data", "why"), WRONG)
def test_a_wrong_line(data: bytes, why: str) -> None:
    asked = parse_request(InputLine(1, data, "", 0))
    assert asked.request is None
    assert why in asked.problem
    assert "\n" not in asked.problem


def test_what_a_line_may_ask() -> None:
    line = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "v"},
        ],
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "max_tokens": 4,
        "seed": 5,
        "stop": "x",
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "think": False,
        "id": "i",
    }
    asked = parse_request(InputLine(1, json.dumps(line).encode(), "", 0))
    assert (asked.id, asked.problem) == ("i", "")
    assert asked.request is not None
    assert [m.role for m in asked.request.messages] == ["system", "user", "assistant", "user"]
    assert asked.request.sampling["stop"] == ("x",)
    assert len(asked.request.sampling) == 9
    assert asked.request.think == "off"
    assert parse_request(InputLine(1, b'{"prompt": "a", "seed": null}', "", 0)).request is not None


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_system_message_is_one(text: str) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "u"}]
    asked = parse_request(InputLine(1, json.dumps({"messages": messages}).encode(), "", 0))
    assert asked.request is not None
    assert [(m.role, m.content) for m in asked.request.messages] == [("system", text), ("user", "u")]
    messages[1]["content"] = text
    asked = parse_request(InputLine(1, json.dumps({"messages": messages}).encode(), "", 0))
    assert asked.problem == "the content of message 2 is empty; add some text."


def test_random_bytes_are_a_line_or_an_error() -> None:
    chance = random.Random(0)
    good = json.dumps(
        {"messages": [{"role": "user", "content": "hello"}], "top_k": 3, "stop": ["x"]}
    ).encode()
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(3)] = chance.choice(
                [b"", b'"', b"{", b"1", b"[", b"null", b"\xff", b"e9"]
            )
        asked = parse_request(InputLine(1, bytes(data), "", 0))
        assert (asked.request is None) == bool(asked.problem)


def test_a_line_beyond_all_bounds_is_an_error_and_the_next_one_is_read() -> None:
    long = b'{"prompt": "' + b"x" * (2 * LINE_LIMIT + 5) + b'"}\n'
    lines = list(read_lines(io.BytesIO(long + b'{"prompt": "a"}'), b""))
    assert [(line.number, line.data is None, line.end) for line in lines] == [
        (1, True, len(long)),
        (2, False, len(long) + 15),
    ]
    assert "longer than 16 MiB" in parse_request(lines[0]).problem
    other = list(read_lines(io.BytesIO(long.replace(b'"}\n', b'."}\n')), b""))
    assert other[0].digest != lines[0].digest


class Stopping(Answering):
    """Ends with `error` after some parts."""

    def __init__(self, error: BaseException, after: int) -> None:
        super().__init__(after)
        self._error, self._after = error, after

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        for number, part in enumerate(super().answers(requests)):
            if number == self._after:
                raise self._error
            yield part


def test_it_goes_on_where_it_stopped_whatever_stopped_it(tmp_path: Path) -> None:
    """Interrupts, failures and lines that were half written, again and again, end in the same file as one run."""
    source = b"\n".join(requests(f"text {n}").strip() + b"\n" * (n % 2) for n in range(30)) + b"not json\n"
    run(source, tmp_path / "whole")
    path, chance = tmp_path / "pieces", random.Random(1)
    for _ in range(12):
        error: BaseException = chance.choice([KeyboardInterrupt(), EngineError("the engine stopped")])
        backend = Stopping(error, chance.randrange(14))
        err = io.StringIO()
        results = Results.open(str(path), io.BytesIO())
        try:
            Batch(backend, io.BytesIO(source), results, b"", err).answer()  # type: ignore[arg-type]
        except KeyboardInterrupt:
            pass
        except EngineError as problem:
            err.write(str(problem))
        finally:
            results.close()
        said = err.getvalue()
        assert "run the same command again to continue" in said or "31 requests" in said
        data = path.read_bytes()
        assert (tmp_path / "whole").read_bytes().startswith(data)
        path.write_bytes(data[: len(data) - chance.choice([0, 0, 1, 7, 60])])
    run(source, path)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    before = path.stat().st_mtime_ns
    backend = Answering()
    _, said = run(source, path, backend)
    assert "Nothing to do" in said
    assert backend.calls == []
    assert path.stat().st_mtime_ns == before


def test_an_output_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "o"
    run(requests("a", "b"), path)
    kept = path.read_bytes()
    for source, settings, why in [
        (requests("a", "c"), b"", "Result 2 in"),
        (requests("a", "b"), b"other", "Result 1 in"),
        (requests("a"), b"", "more results than the input"),
    ]:
        with pytest.raises(EngineError, match=why):
            run(source, path, settings=settings)
        assert path.read_bytes() == kept
    for content in (b"my notes", b"my notes\n", b"{}\n", b'[1]\n{"line": 1', b"\0\0\0"):
        path.write_bytes(content)
        with pytest.raises(EngineError, match="not a result of chatterm batch"):
            run(requests("a"), path)
        assert path.read_bytes() == content


def test_memory_is_bounded_by_what_is_in_flight(tmp_path: Path) -> None:
    """Nothing is read before there is room for it, and nothing is kept that is written."""
    backend = Answering(at_once=3)
    results = Results.open(str(tmp_path / "o"), io.BytesIO())
    source = io.BytesIO(b"not json\n" * 500 + requests(*(f"t{n}" for n in range(300))))
    batch = Batch(backend, source, results, b"", io.StringIO())  # type: ignore[arg-type]
    put: Callable[..., None] = batch._put
    most = 0

    def counted(*arguments: Any) -> None:
        nonlocal most
        put(*arguments)
        most = max(most, len(batch._held), len(batch._asked))

    batch._put = counted  # type: ignore[method-assign]
    batch.answer()
    results.close()
    assert batch.done == 800
    assert most < 60


def test_a_full_disk_is_one_line_and_nothing_half_written_stays(tmp_path: Path) -> None:
    class Full(io.FileIO):
        room = 1000

        def write(self, data: Any) -> int:
            if self.tell() + len(data) > self.room:
                super().write(bytes(data)[: self.room - self.tell()])
                raise OSError(28, "No space left on device")
            return super().write(data)

    path = tmp_path / "o"
    path.touch()
    stream: Any = Full(str(path), "r+b")
    results = Results(str(path), stream, io.BytesIO())
    batch = Batch(Answering(), io.BytesIO(requests("a", "b", "c", "d")), results, b"", io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="No space left on device") as raised:
        batch.answer()
    assert "run the same command again" in str(raised.value)
    results.close()
    assert path.read_bytes().endswith(b"\n")
    whole, _ = run(requests("a", "b", "c", "d"), path)
    assert [r["text"] for r in whole] == ["A", "B", "C", "D"]


WRITES_ON_A_FULL_DISK = """
import io, resource, signal, sys
from chatterm.backends.backend import EngineError
from chatterm.cli.batch import _standard_output
from chatterm.cli.results import Results

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, room = sys.argv[1], int(sys.argv[2])
results = (
    Results("standard output", _standard_output(), io.BytesIO(), resumes=False)
    if path == "-"
    else Results.open(path, io.BytesIO())
)
results.begin()
results.write(b'{"line": 1}\\n')
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
try:
    results.write(b'{"line": 2, ' + b"x" * 100 + b"}\\n")
except EngineError as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError("it was written")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
results.close()
"""
"""A file that must not grow is what a full disk is, in a process of its own."""


def test_a_full_disk_takes_nothing_from_what_was_in_standard_output(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = tmp_path / "o"
    path.write_bytes(before := b"earlier results\n" * 9)
    with path.open("ab") as output:
        command = [sys.executable, "-c", WRITES_ON_A_FULL_DISK, "-", "200"]
        subprocess.run(command, stdout=output, check=True)
    assert path.read_bytes().startswith(before + b'{"line": 1}\n')


def test_what_a_full_disk_refused_is_not_written_later(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = tmp_path / "o"
    subprocess.run([sys.executable, "-c", WRITES_ON_A_FULL_DISK, str(path), "50"], check=True)
    assert path.read_bytes() == b'{"line": 1}\n'


def test_two_at_once_do_not_write_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = Results.open(str(tmp_path / "o"), io.BytesIO())
    with pytest.raises(EngineError, match="Another chatterm batch"):
        Results.open(str(tmp_path / "o"), io.BytesIO())
    first.close()
    Results.open(str(tmp_path / "o"), io.BytesIO()).close()


def test_progress_only_on_a_terminal(tmp_path: Path) -> None:
    for err, shows in ((Terminal(), True), (io.StringIO(), False)):
        results = Results.open(str(tmp_path / str(shows)), io.BytesIO())
        Batch(Answering(), io.BytesIO(requests("a", "b")), results, b"", err).answer()  # type: ignore[arg-type]
        results.close()
        assert ("\x1b[" in err.getvalue()) is shows
        assert "\x1b[?25l" not in err.getvalue(), "the cursor stays: a signal would leave it hidden"
        assert err.getvalue().count("2 requests, 0 errors, 2 tokens") == 1


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    made: list[tuple[str, Any]] = []

    def make(model: str, options: Any) -> Answering:
        made.append((model, options))
        return Answering()

    monkeypatch.setattr("chatterm.backends.local.LocalBackend", make)
    monkeypatch.delenv("CHATTERM_DEBUG", raising=False)
    return made


def test_the_command_line(
    answering: list[tuple[str, Any]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(requests("a"))
    line = [
        "batch",
        "org/name",
        str(source),
        "--temperature",
        "0.5",
        "--stop",
        "x",
        "--system",
        "s",
        "--threads",
        "2",
    ]
    assert call([*line, "-o", str(out)]) == 0
    model, options = answering[0]
    assert (model, options.system, options.threads) == ("org/name", "s", 2)
    assert options.sampling == {"temperature": 0.5, "stop": ("x",)}
    assert json.loads(out.read_text())["text"] == "A"
    assert call(["batch", str(source)]) == 0  # the default model, to standard output
    assert answering[1][0] == "smollm2"
    assert json.loads(capfd.readouterr().out)["text"] == "A"
    with source.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert call(["batch", "m", "-", "-o", str(tmp_path / "piped.jsonl")]) == 0
    assert json.loads((tmp_path / "piped.jsonl").read_text())["text"] == "A"


@pytest.mark.parametrize(
    ("make", "line", "code", "why"),
    [
        (None, "m missing.jsonl -o o", 1, "missing.jsonl cannot be read"),
        (None, "m . -o o", 1, ". is a folder"),
        (b"", "m in -o o", 1, "There are no requests"),
        (b"\n \n", "m in -o o", 1, "There are no requests"),
        (b"{}\n", "m in -o in", 1, "both input and output"),
        (b"{}\n", "m in -o ./link", 1, "both input and output"),
        (b"{}\n", "m in -o .", 1, ". is a folder"),
        (b"{}\n", "m in -o nowhere/o", 1, "no folder nowhere"),
        (b"{}\n", "m in -o o\0", 1, "cannot be written"),
        (b"{}\n", "m in\0 -o o", 1, "cannot be read"),
        (b"{}\n", "m in -o o --top-p 2", 2, "top_p is 2"),
        (b"{}\n", "m in out more", 2, "more"),
        (b"{}\n", "-o o", 2, "MODEL"),
    ],
)
def test_what_makes_no_sense(
    make: bytes | None,
    line: str,
    code: int,
    why: str,
    answering: list[tuple[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if make is not None:
        Path("in").write_bytes(make)
        Path("link").symlink_to("in")
    assert call(["batch", *line.split(" ")]) == code
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
    assert make is None or Path("in").read_bytes() == make
