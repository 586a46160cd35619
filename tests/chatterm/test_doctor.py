"""`chatterm doctor`: what it prints for machines that are made up, and that it never fails."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chatterm.cli import doctor
from chatterm.cli.main import call
from engine.device import CudaProblem
from engine.engine import Engine
from engine.errors import EngineError
from engine.execute.tuning.store import Tuning
from engine.machine.drafts import DraftPair
from engine.machine.expected import PROGRAMS, Here, Program, expected_speed
from engine.machine.links import Links, SplitSpeed
from engine.machine.report import Cpu, Gpu, Machine, MachineFeature
from engine.machine.shapes import COMMON, known_shape
from tests.counting import PATIENCE
from tests.engine.tiny import tiny_engine

GPU = Machine(
    device="cuda",
    dtype="bfloat16",
    gpu=Gpu("NVIDIA H100 80GB HBM3", "sm_90", 84_000_000_000, 85_000_000_000, 1),
    cpu=Cpu("AMD EPYC 9654 96-Core Processor", 16, ("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16")),
    memory_free=130_000_000_000,
    memory_total=137_000_000_000,
    driver="580.65.06",
    driver_cuda="13.0",
    torch_cuda="13.0",
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"},
    attention=(
        MachineFeature("flash", "flash-attn is not installed"),
        MachineFeature("triton", None),
        MachineFeature("sdpa", None),
    ),
    decode=(MachineFeature("fused kernels, CUDA graph", None), MachineFeature("plain modules", None)),
    bandwidth=3.03e12,
    program=Program(0.9, 8e-6),
    speeds=(),
    tunings=(
        Tuning(
            "Qwen3-0.6B",
            {"1 to 8 rows: 1024 x 3072": (2, 8, 1, 3)},
            {"1": (565e-6, 544e-6), "16": (7e-4, 7e-4)},
        ),
    ),
    drafts=(),
    advice=("flash-attn is missing: pip install flash-attn --no-build-isolation",),
    failures=(),
)


def with_speeds(machine: Machine, free: int) -> Machine:
    import torch

    device = torch.device(machine.device)
    here = Here(device, torch.bfloat16, machine.program, False, machine.bandwidth, free)
    speeds = [expected_speed(name, known_shape(name), here) for name in COMMON]
    return replace(machine, speeds=tuple(speeds))


TWO = replace(GPU, links=Links(2, ("NV18",), True), splits=(SplitSpeed("qwen3:8b", 205.0, 340.0),))
CPU = replace(
    GPU,
    device="cpu",
    gpu=None,
    driver=None,
    driver_cuda=None,
    torch_cuda=None,
    packages={"torch": "2.13.0+cpu"},
    attention=(MachineFeature("flash", "it needs an NVIDIA GPU"), MachineFeature("sdpa", None)),
    decode=(
        MachineFeature("fused kernels, CUDA graph", "it needs an NVIDIA GPU"),
        MachineFeature("plain modules", None),
    ),
    bandwidth=20e9,
    program=PROGRAMS["plain modules, CPU"],
    tunings=(),
    drafts=(DraftPair("qwen3:8b-q4", "qwen3:0.6b-q8", 639_000_000, 918_000_000, True),),
    advice=(),
)
BROKEN = replace(
    CPU,
    cpu=None,
    memory_free=None,
    bandwidth=None,
    attention=(),
    failures=("The CPU could not be\x1b[2J read",),
)
AMD = replace(
    GPU,
    gpu=Gpu("AMD Radeon RX 7900 XTX", "gfx1100", 24_000_000_000, 25_000_000_000, 1, is_amd=True),
    driver=None,
    driver_cuda=None,
    torch_cuda=None,
    packages={"torch": "2.11.0+rocm6.4", "triton": "3.6.0"},
    attention=(MachineFeature("triton", "it needs an NVIDIA GPU"), MachineFeature("sdpa", None)),
    decode=(
        MachineFeature("fused kernels, CUDA graph", "this is an AMD GPU"),
        MachineFeature("plain modules", None),
    ),
    program=PROGRAMS["plain modules"],
    tunings=(),
)
MACHINES = {
    "gpu": with_speeds(GPU, 84_000_000_000),
    "cpu": with_speeds(CPU, 8_000_000_000),
    "broken": with_speeds(BROKEN, 0),
}


def use(monkeypatch: pytest.MonkeyPatch, machine: "Machine | str") -> None:
    monkeypatch.setattr(doctor, "_inspect", lambda _: machine)
    monkeypatch.setattr("chatterm.tools.builtin.sandbox.program", lambda: "/usr/bin/bwrap")


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: "Machine | str", *more: str
) -> str:
    use(monkeypatch, machine)
    assert call(["doctor", *more]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_models_that_can_draft_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(monkeypatch, capsys, MACHINES["cpu"])
    assert ["qwen3:8b-q4", "qwen3:0.6b-q8", "639", "MB", "918", "MB", "yes"] in rows(text)
    assert "--draft auto" in text
    assert "Draft models" not in printed(monkeypatch, capsys, MACHINES["gpu"])


def test_an_amd_gpu_is_called_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(monkeypatch, capsys, with_speeds(AMD, 24_000_000_000))
    assert "AMD Radeon RX 7900 XTX (gfx1100), 24 GB of 25 GB free" in text
    assert "torch 2.11.0+rocm6.4 (built for AMD GPUs)" in text
    assert ["Decode", "fused", "kernels,", "CUDA", "graph", "no:", "this", "is", "an", "AMD", "GPU"] in rows(
        text
    )


def test_a_gpu_in_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(monkeypatch, capsys, MACHINES["gpu"])
    for part in (
        "NVIDIA H100 80GB HBM3 (sm_90), 84 GB of 85 GB free",
        "580.65.06, supports CUDA up to 13.0",
        "16 cores, AVX2, AVX-512,",
        "3,030 GB/s copied within the GPU",
        "torch 2.11.0+cu130 (built for CUDA 13.0), triton 3.6.0",
        "cuda, bfloat16",
        "no: flash-attn is not installed",
        "90% of the memory bandwidth, plus 8 us per layer",
        "pip install flash-attn",
    ):
        assert part in text
    assert ["triton", "used"] in rows(text)
    assert ["sdpa", "works", "too"] in rows(text)
    (small,) = [row for row in rows(text) if row[:1] == ["qwen3:0.6b"]]
    assert small[:5] == ["qwen3:0.6b", "596M", "1.2", "GB", "40,960"]
    assert 1000 < int(small[5].replace(",", "")) < 2540
    assert text.isascii()
    assert ["Qwen3-0.6B", "1", "565", "us", "544", "us", "3.7%"] in rows(text)


class Tuned:
    """An engine that was tuned, and its tuner."""

    def __init__(self, chosen: dict[str, tuple[int, ...]]) -> None:
        self.chosen, self.closed = chosen, False

    def tuner(self) -> "Tuned":
        return self

    def run(self, told: Callable[[str], None]) -> Tuning:
        for name in self.chosen:
            told(name)
        return Tuning("tiny", self.chosen, {"1": (565e-6, 544e-6), "prompt": (1e-3, 1e-3)})

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (
            {"1 to 8 rows: 1024 x 3072": (2, 8, 1, 3)},
            "1 to 8 rows: 1024 x 3072  2 folds, 8 warps, 1 tile, 3 ahead",
        ),
        ({}, "Nothing to change: the built-in choices are the fastest here."),
    ],
)
def test_tuning_now_tells_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: dict[str, tuple[int, ...]],
    line: str,
) -> None:
    engine, asked = Tuned(chosen), dict[str, Any]()

    def load(model: str, **options: Any) -> Tuned:
        asked.update(options, model=model)
        return engine

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr("engine.device.check_tunable", lambda _: None)
    assert call(["doctor", "--tune", "tiny"]) == 0
    assert engine.closed
    assert (asked["model"], asked["tune"]) == ("tiny", False)
    assert capsys.readouterr().out.splitlines() == [
        "Fastest choices for tiny",
        f"  {line}",
        "  one token 565 us, tuned 544 us; attention of a prompt 1,000 us, tuned 1,000 us.",
    ]


def test_tuning_without_a_gpu_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (
        tiny_engine(tmp_path) as engine,
        pytest.raises(EngineError, match="Only the fused kernels of a GPU can be tuned"),
    ):
        engine.tuner()
    assert call(["doctor", "--tune", "tiny", "--json"]) == 2
    assert "leave out --json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tune", "--profile"])
def test_without_a_gpu_no_model_is_loaded_to_be_tuned(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.device.cuda_problem", lambda _: CudaProblem("there is none"))
    monkeypatch.setattr(Engine, "load", lambda *arguments, **options: pytest.fail("a model was loaded"))
    assert call(["doctor", option, "tiny"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "chatterm: Only the fused kernels of a GPU can be tuned or profiled, and there is none."
    )
    assert said.count("\n") == 1


def test_a_cpu_tells_as_much(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(monkeypatch, capsys, MACHINES["cpu"])
    for part in (
        "none usable by torch",
        "20 GB/s read by the CPU",
        "built without CUDA",
        "Nothing to install",
    ):
        assert part in text
    assert "Driver" not in text
    assert "These fit but are slow here: qwen3:1.7b (2.6)." in text
    assert ["qwen3:8b", "8.19B", "16", "GB", "does", "not", "fit", "-"] in rows(text)
    (small,) = [row for row in rows(text) if row[:1] == ["qwen3:0.6b"]]
    assert float(small[-1]) == pytest.approx(0.45 * 20e9 / (1.192e9 + 0.0587e9), abs=0.06)


def test_what_could_not_be_found_out_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(monkeypatch, capsys, MACHINES["broken"])
    assert "Could not be determined" in text
    assert "The CPU could not be" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_on_a_terminal_nothing_is_wider_than_it(name: str, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    doctor._paint(console, doctor.sections(MACHINES[name]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "Expected speed" in lines
    assert "8.19B" in out.getvalue()
    assert "…" not in out.getvalue()


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    use(monkeypatch, MACHINES["gpu"])
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert call(["doctor"]) == 0
    assert "\x1b[32mused" in out.getvalue()


@pytest.mark.parametrize("name", MACHINES)
def test_json_has_it_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = json.loads(printed(monkeypatch, capsys, MACHINES[name], "--json"))
    assert found["device"] == MACHINES[name].device
    assert [speed["name"] for speed in found["speeds"]] == list(COMMON)
    assert found["decode"][-1] == {"name": "plain modules", "reason": None}


def test_a_torch_that_does_not_import_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "engine.machine.report", None)
    assert call(["doctor"]) == 0
    assert "torch cannot be imported" in capsys.readouterr().out
    assert call(["doctor", "--json"]) == 0
    assert "torch cannot be imported" in json.loads(capsys.readouterr().out)["failures"][0]


def test_the_command_on_this_machine() -> None:
    code = "import sys; from chatterm.cli.main import call; code = call(['doctor', '--json']); "
    code += "print(any(m in sys.modules for m in ('textual', 'transformers')), code, file=sys.stderr)"
    done: Any = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stderr == "False 0\n"
    found = json.loads(done.stdout)
    assert found["bandwidth"] > 1e8
    assert found["cpu"]["cores"] >= 1


def test_several_gpus_and_what_dividing_a_model_may_give() -> None:
    report = doctor.plain(doctor.sections(TWO))
    assert "NV18 between 2 GPUs; each can access the others' memory" in report
    assert "Divided among 2 GPUs (--tensor-parallel 2)" in report
    assert "1.66x" in report
    apart = replace(TWO, links=Links(2, ("SYS",), False), splits=())
    report = doctor.plain(doctor.sections(apart))
    assert "not all can access each other's memory" in report
    assert "Divided" not in report


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "x.json"], "goes with --profile"),
        (["--tune", "smollm2", "--trace", "x.json"], "goes with --profile"),
        (["--profile", "smollm2", "--trace", "none/x.json"], "no folder none"),
        (["--profile", "smollm2", "--trace", "."], "is a folder"),
    ],
)
def test_a_trace_without_a_place_is_refused_before_any_work(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("works", "is_there", "row", "advised"),
    [
        ("/usr/bin/bwrap", True, "bubblewrap (/usr/bin/bwrap)", False),
        (None, True, "does not let it run", False),
        (None, False, "none: bubblewrap is missing", True),
    ],
)
def test_it_names_bubblewrap(
    works: str | None,
    is_there: bool,
    row: str,
    advised: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, MACHINES["cpu"])
    monkeypatch.setattr("chatterm.tools.builtin.sandbox.program", lambda: works)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap" if is_there else None)
    monkeypatch.setattr("sys.platform", "linux")
    doctor.examine()
    out = " ".join(capsys.readouterr().out.split())
    assert row in out
    assert ("install the package bubblewrap" in out) == advised
    doctor.examine(as_json=True)
    assert row in json.loads(capsys.readouterr().out)["sandbox"]
