"""Which device is taken, and what is said when it is not the GPU: every kind of machine, made up."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import device
from engine.device import (
    DeviceChoice,
    check_parallel,
    check_tunable,
    cuda_problem,
    driver_cuda,
    pick_device,
    pick_dtype,
    runs_on,
)
from engine.errors import EngineError
from engine.execute import loading
from engine.machine import report
from engine.machine.memory_check import fewest_ranks
from engine.params import LoadOptions
from models.files import ModelFiles

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx\nmore"
)


class Machine:
    """Makes torch and the driver say what they would say on another machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self._torch("version.hip", None)

    def _torch(self, name: str, value: Any) -> None:
        self.patch.setattr(f"torch.{name}", value)

    def driver(self, cuda: tuple[int, int] | None) -> None:
        self.patch.setattr(device, "has_nvidia_driver", lambda: cuda is not None)
        self.patch.setattr(device, "driver_cuda", lambda: cuda)

    def without_cuda(self) -> None:
        self._torch("version.cuda", None)
        self._torch("cuda.is_available", lambda: False)

    def broken(self, error: Exception) -> None:
        """As a torch with CUDA does it: a warning from is_available, an error from init."""

        def is_available() -> bool:
            warnings.warn(f"CUDA initialization: {error}", UserWarning, stacklevel=2)
            return False

        def init() -> None:
            raise error

        self._torch("version.cuda", "13.0")
        self._torch("cuda.is_available", is_available)
        self._torch("cuda.init", init)

    def gpu(self, capability: tuple[int, int], name: str = "NVIDIA Test") -> None:
        self._torch("version.cuda", "13.0")
        self._torch("cuda.is_available", lambda: True)
        self._torch("cuda.get_arch_list", lambda: ARCHITECTURES)
        self._torch("cuda.get_device_capability", lambda device=None: capability)
        self._torch("cuda.get_device_name", lambda device=None: name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def refused() -> str:
    with pytest.raises(EngineError) as caught:
        pick_device("cuda")
    return str(caught.value)


def told() -> str:
    """The one note of a chat that goes on on the CPU."""
    choice = pick_device("auto")
    assert choice.device.type == "cpu"
    (note,) = choice.notes
    assert "\n" not in note
    return note


def test_the_cpu_needs_no_explanation(machine: Machine) -> None:
    machine.driver(None)
    machine.without_cuda()
    assert pick_device("cpu") == DeviceChoice(torch.device("cpu"))
    assert pick_device("auto") == DeviceChoice(torch.device("cpu"))
    assert refused().endswith("was built without CUDA. Use --device cpu or auto.")


def test_a_name_that_is_no_device(machine: Machine) -> None:
    with pytest.raises(EngineError, match="Unknown device 'tpu'"):
        pick_device("tpu")


@pytest.mark.parametrize("message", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available"])
def test_torch_with_cuda_and_no_gpu(machine: Machine, message: str) -> None:
    machine.broken(RuntimeError(message))
    assert pick_device("auto").notes == ()
    assert (
        refused() == "--device cuda cannot be used: no usable NVIDIA GPU was found. Use --device cpu or auto."
    )


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [
        ((13, 1), "To use the GPU: pip install --force-reinstall torch --index-url https://*/cu130"),
        ((12, 4), "To use the GPU: pip install --force-reinstall torch --index-url https://*/cu126"),
        ((11, 8), "Update the NVIDIA driver (580 or newer), then pip install"),
    ],
)
def test_torch_without_cuda_beside_an_nvidia_driver(
    machine: Machine, cuda: tuple[int, int], remedy: str
) -> None:
    machine.driver(cuda)
    machine.without_cuda()
    start, _, build = remedy.partition("*/")
    for said in (told(), refused()):
        assert f"this torch ({torch.__version__}) was built without CUDA" in said
        assert start in said
        assert said.endswith(build)


def test_a_driver_that_is_too_old_is_said_without_noise(machine: Machine) -> None:
    machine.broken(RuntimeError(TOO_OLD))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note = told()
    assert "too old for this torch: it supports CUDA 12.2, torch needs 13.0" in note
    assert note.startswith("The model runs on the CPU because")
    assert note.endswith("/cu126")
    assert "Update the driver" in refused()


def test_a_driver_that_no_torch_runs_on(machine: Machine) -> None:
    machine.broken(RuntimeError(TOO_OLD.replace("12020", "11040")))
    note = told()
    assert "it supports CUDA 11.4" in note
    assert note.endswith("Update the driver (580 or newer).")


def test_cuda_that_does_not_start(machine: Machine) -> None:
    machine.broken(
        RuntimeError("Unexpected error from cudaGetDeviceCount()\nError 802: system not initialized")
    )
    assert "CUDA failed to start (Unexpected error from cudaGetDeviceCount())" in told()


def test_a_gpu_that_this_torch_has_no_code_for(machine: Machine) -> None:
    machine.gpu((6, 1), "NVIDIA GeForce GTX 1080")
    note = told()
    assert "this build of torch does not support NVIDIA GeForce GTX 1080 (sm_61)" in note
    assert note.endswith("/cu126")
    assert "(sm_61)" in refused()


def test_an_old_gpu_works_with_what_it_can(machine: Machine) -> None:
    machine.gpu((7, 5), "Tesla T4")
    for name in ("auto", "cuda"):
        choice = pick_device(name)
        assert choice.device.type == "cuda"
        (note,) = choice.notes
        for part in ("Tesla T4 (sm_75)", "sm_80", "bfloat16", "FlashAttention", "fused kernels", "float16"):
            assert part in note
    assert pick_dtype("auto", torch.device("cuda")) is torch.float16


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)])
def test_a_gpu_of_today_needs_no_note(machine: Machine, capability: tuple[int, int]) -> None:
    machine.gpu(capability)
    assert pick_device("auto") == DeviceChoice(torch.device("cuda"))
    assert cuda_problem() is None
    assert pick_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90"], False),
        ((10, 0), ["sm_90", "compute_90"], True),
        ((7, 0), ["sm_75", "compute_120"], False),
        ((7, 0), [], True),
    ],
)
def test_which_code_runs_where(capability: tuple[int, int], built_for: list[str], runs: bool) -> None:
    assert runs_on(capability, built_for) is runs


def test_the_driver_tells_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 12_080
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert driver_cuda() == (12, 8)

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert driver_cuda() is None


def test_an_nvidia_driver_is_found_by_its_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not device.has_nvidia_driver()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert device.has_nvidia_driver()


def test_what_cannot_be_tuned_is_told_with_what_to_do(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untunable() -> str:
        with pytest.raises(EngineError, match=r"^Only the fused kernels of a GPU can be tuned") as caught:
            check_tunable()
        return str(caught.value)

    machine.broken(RuntimeError("Found no NVIDIA driver on your system."))
    assert untunable().endswith(
        "no usable NVIDIA GPU was found. Use a machine with an NVIDIA GPU of sm_80 or newer."
    )
    machine.broken(RuntimeError(TOO_OLD))
    assert "Update the driver" in untunable()
    machine.gpu((7, 5), "NVIDIA T4")
    assert "NVIDIA T4 (sm_75) is older than sm_80. Use a machine" in untunable()
    machine.gpu((9, 0))
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert untunable().endswith("triton is not installed. Install it: pip install triton")
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    check_tunable()


# --- one GPU of several


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the first of which is too old for most."""
    told = {
        "get_device_capability": ((7, 5), (9, 0)),
        "get_device_name": ("NVIDIA T4", "NVIDIA H100"),
        "mem_get_info": ((10, 20), (30, 40)),
    }

    def of(values: tuple[Any, Any]) -> Any:
        return lambda device=None: values[(device.index if device is not None else None) or 0]

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ARCHITECTURES)
    for name, values in told.items():
        monkeypatch.setattr(f"torch.cuda.{name}", of(values))


@pytest.mark.usefixtures("gpus")
def test_one_gpu_of_several_is_named_and_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda"), torch.device("cuda:1")
    assert pick_device("cuda:1") == DeviceChoice(second)
    assert "NVIDIA T4 (sm_75)" in pick_device("cuda:0").notes[0]
    assert (pick_dtype("auto", first), pick_dtype("auto", second)) == (torch.float16, torch.bfloat16)
    assert (device.available_memory(first), device.available_memory(second)) == (10, 30)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    check_tunable("cuda:1")
    with pytest.raises(EngineError, match="NVIDIA T4"):
        check_tunable("auto")
    packs = loading.packs
    monkeypatch.setattr("engine.kernels.on_gpu.triton_problem", lambda device: None)
    assert packs(torch.bfloat16, first) is None
    assert packs(torch.bfloat16, second) is not None


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:17"])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    line = f"--device {name} cannot be used: this machine has 2 GPUs. Use one of: cuda:0, cuda:1."
    with pytest.raises(EngineError) as caught:
        pick_device(name)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "name", ["cuda:", "cuda:x", "cuda:-1", "cuda1", "cuda:1 ", "CUDA", "", "cuda:1000", "mps"]
)
def test_what_names_no_device_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match=r"^Unknown device .* as in cuda:1\.$"):
        pick_device(name)


@pytest.mark.usefixtures("gpus")
def test_a_named_gpu_divides_no_model() -> None:
    check_parallel(1, torch.device("cuda:1"))
    check_parallel(2, torch.device("cuda"))
    with pytest.raises(EngineError, match="--device cuda:1 names one; use --device cuda"):
        check_parallel(2, torch.device("cuda:1"))


@pytest.mark.usefixtures("gpus")
def test_a_named_gpu_is_enough_for_a_model_divided_as_needed() -> None:
    assert fewest_ranks(ModelFiles("any"), LoadOptions("cuda:1")) == 1


@pytest.mark.usefixtures("gpus")
def test_the_doctor_examines_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "measure_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(report, "find_links", lambda: None)
    monkeypatch.setattr(report, "_tunings", lambda device: ())
    found = report.inspect_machine("cuda:1")
    assert (found.device, found.dtype) == ("cuda:1", "bfloat16")
    assert found.gpu == report.Gpu("NVIDIA H100", "sm_90", 30, 40, 2, 1)
    assert report.inspect_machine().gpu == report.Gpu("NVIDIA T4", "sm_75", 10, 20, 2, 0)
