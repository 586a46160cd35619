"""Machines where our GPU kernels do not run: what Triton lacks there, AMD GPUs, and what is said and done instead."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chatterm.cli.show import computed_by
from engine.attention.choose import AttentionChoice, choose_attention, usable_backends
from engine.build import _speed_up_gpu
from engine.device import check_tunable, has_pdl, pick_device, pick_dtype
from engine.errors import EngineError
from engine.execute import loading
from engine.execute.build_options import BuildOptions
from engine.execute.cuda import host_call
from engine.kernels import on_gpu
from engine.kernels.triton.launch import has_warpgroups
from engine.machine.report import decode_programs
from models.errors import TooLargeError
from models.loading.plan import LoadPlan, Target, read_tensors
from models.weights.matching import match
from models.weights.packed_groups import expansion_note
from tests.engine.test_compatibility import a_network, a_spec, put_together
from tests.engine.test_device import Machine
from tests.models.checkpoints import files_of, random_model, tiny_llama, write_gguf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GCC = "Triton needs a C compiler: install gcc"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    on_gpu.tried.cache_clear()
    yield Machine(monkeypatch)
    on_gpu.tried.cache_clear()


@pytest.fixture
def amd(machine: Machine) -> Machine:
    machine.gpu((11, 0), "AMD Radeon RX 7900 XTX")
    machine.patch.setattr("torch.version.hip", "6.4")
    machine.patch.setattr("torch.version.cuda", None)
    return machine


# -- what Triton lacks


class Tools:
    """What is installed on a machine: programs by name, and whether Python's headers are where Python says."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.there: set[str] = set()
        self.header = folder / "Python.h"
        patch.delenv("CC", raising=False)
        patch.setattr(on_gpu.shutil, "which", lambda name: f"/bin/{name}" if name in self.there else None)
        patch.setattr(on_gpu.sysconfig, "get_paths", lambda scheme: {"include": str(folder)})
        patch.setattr(on_gpu.subprocess, "run", self._compile)
        self.finds_header = False

    def _compile(self, command: list[str], **options: Any) -> Any:
        assert command[0].removeprefix("/bin/") in self.there
        return subprocess.CompletedProcess(command, 0 if self.finds_header else 1)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tools:
    return Tools(monkeypatch, tmp_path)


def test_what_triton_lacks_is_named_with_what_to_install(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = "python3-dev (on Fedora python3-devel)"
    both = f"Triton needs a C compiler and Python's headers: install gcc and {headers}"
    assert on_gpu.missing() == both
    tools.there.add("clang")
    assert on_gpu.missing() == f"Triton needs Python's headers: install {headers}"
    tools.finds_header = True  # in a folder that only the compiler knows
    assert on_gpu.missing() is None
    tools.header.touch()
    tools.finds_header = False
    assert on_gpu.missing() is None
    tools.there.clear()
    assert on_gpu.missing() == GCC
    tools.there.add("gcc")
    monkeypatch.setenv("CC", "icc")
    assert on_gpu.missing() == (
        "Triton needs a C compiler, and there is no icc: correct the variable CC, or unset it"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            PermissionError(13, "Permission denied", "/home/me/.triton/cache/ABC"),
            "Triton cannot write to /home/me/.triton/cache (Permission denied): set TRITON_CACHE_DIR to a folder "
            "that can be written to",
        ),
        (
            AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"),
            "Triton does not find libcuda.so.1: set TRITON_LIBCUDA_PATH to the folder that has it",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "/sbin/ldconfig"),
            "Triton does not find libcuda.so.1: set TRITON_LIBCUDA_PATH to the folder that has it",
        ),
        (
            subprocess.CalledProcessError(1, ["/usr/bin/gcc", "x.c"]),
            "Triton's C compiler fails here (gcc): install gcc and python3-dev (on Fedora python3-devel)",
        ),
        (
            RuntimeError(
                "Failed to find C compiler. Please specify via CC environment variable or set a knob."
            ),
            GCC,
        ),
        (RuntimeError(""), "Triton does not work here (RuntimeError: RuntimeError(''))"),
    ],
)
def test_whatever_triton_raises_at_its_first_launch_becomes_a_reason(
    machine: Machine, tools: Tools, error: Exception, reason: str
) -> None:
    pytest.importorskip("triton")
    tools.there.add("gcc")
    tools.header.touch()

    def fail(device: torch.device) -> bool:
        raise error

    machine.patch.setattr("engine.kernels.triton.trial.runs", fail)
    assert on_gpu.triton_problem(CPU) == reason


def test_a_triton_that_computes_nonsense_is_found_out(machine: Machine, tools: Tools) -> None:
    pytest.importorskip("triton")
    tools.there.add("gcc")
    tools.header.touch()
    machine.patch.setattr("engine.kernels.triton.trial.runs", lambda device: False)
    assert on_gpu.triton_problem(CPU) == "Triton computes wrong results here"
    on_gpu.tried.cache_clear()
    full = torch.OutOfMemoryError("CUDA out of memory")
    machine.patch.setattr("engine.kernels.triton.trial.runs", lambda device: (_ for _ in ()).throw(full))
    assert on_gpu.triton_problem(CPU) is None, "who loads a model says that there is no memory"
    machine.patch.setattr("engine.kernels.triton.trial.runs", lambda device: False)
    assert on_gpu.triton_problem(CPU) is not None, "and the trial is made once there is some"
    on_gpu.tried.cache_clear()
    machine.patch.setattr("engine.kernels.triton.trial.runs", lambda device: True)
    assert on_gpu.triton_problem(CPU) is None


def test_without_a_compiler_triton_says_so_itself_and_nothing_reaches_the_terminal(tmp_path: Path) -> None:
    """With the real Triton, in a process of its own: it has to compile the functions that it launches kernels with."""
    pytest.importorskip("triton")
    code = (
        "import torch, engine.kernels.on_gpu as on_gpu\n"
        "def runs(device):\n"
        "    from triton.runtime.build import compile_module_from_src\n"
        "    compile_module_from_src('#include <Python.h>', 'utils')\n"
        "import engine.kernels.triton.trial as trial\n"
        "trial.runs = runs\n"
        "print(on_gpu.triton_problem(torch.device('cpu')))"
    )
    folder = Path(__file__).parents[2]
    found = {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True, cwd=folder)
    assert done.stdout.startswith("Triton needs a C compiler")
    assert done.stderr == ""


# -- what is done instead


def test_without_triton_nothing_is_fused_and_one_line_says_what_to_install(machine: Machine) -> None:
    machine.gpu((9, 0))
    machine.patch.setattr(on_gpu, "triton_problem", lambda device: GCC)
    machine.patch.setattr("engine.attention.choose.triton_problem", lambda device: GCC)
    assert loading.packs(torch.bfloat16, CUDA) is None, "quantised weights are expanded"
    machine.patch.setitem(sys.modules, "flash_attn_2_cuda", None)
    assert choose_attention("auto", CUDA, torch.bfloat16, 64) == AttentionChoice("sdpa", 32)
    pieces, network = put_together(a_spec(), fused=False), a_network(a_spec())
    runner = pieces.runner
    _speed_up_gpu(pieces, network, CUDA, BuildOptions())
    assert (pieces.runner, pieces.decode_runner) == (runner, None)
    assert pieces.notes == (f"Computed by plain PyTorch, which is slower: {GCC}.",)
    with pytest.raises(EngineError, match=f"--deterministic cannot be used on this GPU: {GCC}"):
        _speed_up_gpu(pieces, network, CUDA, BuildOptions(deterministic=True))
    machine.gpu((7, 5))
    pieces = put_together(a_spec(), fused=False)
    _speed_up_gpu(pieces, network, CUDA, BuildOptions())
    assert pieces.notes == (), "choosing the device has told it"


def test_weights_that_fit_only_quantized_are_refused_with_why_they_are_expanded(
    machine: Machine, tmp_path: Path
) -> None:
    machine.gpu((9, 0))
    machine.patch.setattr(on_gpu, "triton_problem", lambda device: GCC)
    machine.patch.setattr("engine.kernels.native.library.problem", lambda: "there is none")
    note = "The weights of this file (Q4_0) are expanded from 5 GB to 16 GB."
    plan = LoadPlan(Target(torch.bfloat16, CUDA), a_spec(), [], {}, notes=(note,))

    def load(plan: Any, on_progress: Any) -> None:
        raise TooLargeError("The model needs 16 GB of memory on cuda, but 12 GB are free.")

    machine.patch.setattr(loading, "fill_network", load)
    with pytest.raises(TooLargeError) as caught:
        loading.load_here(plan)
    assert str(caught.value) == (
        f"The quantised weights have to be expanded ({GCC}): The model needs 16 GB of memory on cuda, but 12 GB are "
        "free."
    )
    with pytest.raises(TooLargeError, match=r"^The model needs 16 GB"):
        loading.load_here(replace(plan, notes=()))


def test_the_note_about_expanded_weights(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as GGUF

    path = write_gguf(
        tmp_path / "q.gguf", random_model(tiny_llama(intermediate_size=64)), {"ffn_down": GGUF.Q8_0}
    )
    spec, tensors, names, _ = read_tensors(files_of(path))
    note = expansion_note(tensors, match(spec, tensors, names), None, torch.bfloat16)
    assert note is not None
    assert note.startswith("The weights of this file (")
    assert "Q8_0" in note


# -- AMD


def test_an_amd_gpu_that_gives_hoppers_number_gets_none_of_its_instructions(amd: Machine) -> None:
    amd.gpu((9, 0), "AMD Instinct MI210")
    has_warpgroups.cache_clear()
    assert not has_pdl(CUDA)
    assert not has_warpgroups(CUDA)
    has_warpgroups.cache_clear()
    with pytest.raises(EngineError, match="AMD Instinct MI210 is an AMD GPU"):
        check_tunable()


@pytest.mark.usefixtures("amd")
def test_an_amd_gpu_computes_with_plain_torch_and_a_note_says_so() -> None:
    for name in ("auto", "cuda"):
        choice = pick_device(name)
        assert choice.device == CUDA
        (note,) = choice.notes
        assert note.startswith("AMD Radeon RX 7900 XTX computes with plain PyTorch")
    assert pick_dtype("auto", CUDA) is torch.bfloat16
    assert choose_attention("auto", CUDA, torch.bfloat16, 64) == AttentionChoice("sdpa", 32)
    assert [reason is None for _, reason in usable_backends(CUDA)] == [False, False, True]
    assert loading.packs(torch.bfloat16, CUDA) is None
    assert host_call.problem() is not None
    reason = on_gpu.problem(CUDA)
    assert reason is not None
    assert "AMD" in reason
    assert [part.reason for part in decode_programs(CUDA)] == [reason, reason, None]
    assert on_gpu.triton_problem(CUDA) == reason, "Triton's own backend for AMD is not tried"
    assert ("On a GPU", f"plain PyTorch, which is slower: {reason}") in computed_by(a_spec())
