"""What the doctor finds out: estimates from shapes, a real measurement, probes that fail."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import device as device_module
from engine.cache.kv_rows import token_bytes
from engine.device import CudaProblem
from engine.kernels.native import library as native
from engine.machine import report as machine_module
from engine.machine.expected import (
    CONTEXT,
    NATIVE,
    PROGRAMS,
    Here,
    Program,
    Speed,
    catalogue_speed,
    expected_speed,
    speed_here,
    suited,
)
from engine.machine.report import (
    Gpu,
    MachineFeature,
    advice,
    decode_programs,
    inspect_machine,
    measure_bandwidth,
)
from engine.machine.shapes import COMMON, CONFIGS, known_shape
from models.hub.catalogue import HUB_FILES, names
from models.spec import each_attention
from models.weights.slots import parameters

GIB = 2**30
CPU = torch.device("cpu")


def speed(name: str, **changes: Any) -> Speed:
    stored = changes.pop("stored", None)
    here = Here(torch.device("cuda"), torch.bfloat16, Program(1.0, 0.0), False, 3.03e12, 70 * GIB)
    return expected_speed(name, known_shape(name), replace(here, **changes), stored)


def test_the_speed_is_bytes_over_bandwidth() -> None:
    kv = 2 * 28 * 8 * 128 * 2 * CONTEXT
    found = speed("qwen3:0.6b").tokens_per_s
    assert found == pytest.approx(3.03e12 / (2 * 596_049_920 + kv))
    slower = speed("qwen3:0.6b", program=Program(0.5, 1e-5)).tokens_per_s
    assert found is not None
    assert slower == pytest.approx(1 / (2 / found + 28e-5))


def test_an_embedding_that_is_no_output_layer_is_not_read() -> None:
    config = known_shape("qwen3:8b")
    kv = 2 * 36 * 8 * 128 * 2 * CONTEXT
    read = 2 * (8_190_735_360 - config.vocab_size * config.hidden_size) + kv
    assert speed("qwen3:8b").tokens_per_s == pytest.approx(3.03e12 / read)


def test_what_fits() -> None:
    assert speed("qwen3:8b", free=70 * GIB).context == 40_960
    assert 0 < speed("qwen3:8b", free=17 * GIB).context < 40_960
    assert speed("qwen3:8b", free=12 * GIB).context == 0
    assert speed("qwen3:8b", free=None).context == 0
    assert speed("qwen3:8b", bandwidth=None).tokens_per_s is None


def test_the_bandwidth_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_READ_BYTES", 2**26)
    assert measure_bandwidth(CPU) > 0
    ticks = count()
    monkeypatch.setattr(machine_module, "perf_counter", lambda: next(ticks) / 100)
    assert measure_bandwidth(CPU) == pytest.approx(100 * 2**26)
    assert next(ticks) < 60, "it takes about half a second"


def test_a_cpu_decodes_with_native_kernels_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.native.library.problem", lambda: "there is no compiler")
    programs = decode_programs(CPU)
    assert (programs[0].name, programs[0].reason) == (NATIVE, "there is no compiler")
    assert [part.reason is None for part in programs[1:]] == [False, False, True]


def test_native_kernels_are_named_with_variant_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.problem() is not None:
        pytest.skip("they are not built")
    monkeypatch.setattr("engine.kernels.native.library.physical_cores", lambda: 4)
    best = native.library().best_name
    assert decode_programs(CPU)[0] == MachineFeature(f"native kernels, {best}, 3 threads", None)
    monkeypatch.setattr("engine.kernels.native.library.physical_cores", lambda: 1)
    assert decode_programs(CPU)[0].name.endswith(", 1 thread")


def test_weights_that_stay_quantized_are_read_and_held_as_they_are() -> None:
    kv = 2 * 30 * 3 * 64 * 2 * CONTEXT
    found = speed("smollm2", stored=98_362_432)
    assert found.weight_bytes == 98_362_432
    assert found.tokens_per_s == pytest.approx(3.03e12 / (98_362_432 + kv))


ON_A_CPU = Here(CPU, torch.bfloat16, Program(1.0, 0.0), True, 46e9, 24 * GIB)
ON_A_GPU = replace(ON_A_CPU, device=torch.device("cuda"), keeps_blocks=False)


def test_a_quantized_model_takes_and_reads_its_file_on_a_cpu() -> None:
    found, plain = catalogue_speed("qwen3:4b-q4", ON_A_CPU), catalogue_speed("qwen3:4b", ON_A_CPU)
    file = HUB_FILES["qwen3:4b-q4"]
    per_token = 2 * 36 * 8 * 128 * 2
    assert (found.weight_bytes, found.download_bytes) == (file.bytes, file.bytes)
    assert found.memory_bytes == file.bytes + 4096 * per_token
    assert found.tokens_per_s == pytest.approx(46e9 / (file.bytes + CONTEXT * per_token))
    assert plain.download_bytes == plain.weight_bytes == 2 * plain.parameters
    assert plain.int4_tokens_per_s is not None
    assert plain.tokens_per_s is not None
    assert plain.tokens_per_s < plain.int4_tokens_per_s < found.tokens_per_s
    assert found.int4_tokens_per_s is None


def test_a_gpu_expands_what_is_quantized() -> None:
    found, plain = catalogue_speed("qwen3:4b-q4", ON_A_GPU), catalogue_speed("qwen3:4b", ON_A_GPU)
    assert found.tokens_per_s == plain.tokens_per_s
    assert found.memory_bytes == plain.memory_bytes
    assert found.download_bytes == HUB_FILES["qwen3:4b-q4"].bytes
    assert plain.int4_tokens_per_s is None


def test_the_unread_embedding_is_as_small_as_the_other_weights() -> None:
    config, file = known_shape("qwen3:8b"), HUB_FILES["qwen3:8b-q4"]
    found = catalogue_speed("qwen3:8b-q4", ON_A_CPU)
    unread = config.vocab_size * config.hidden_size * file.bytes / found.parameters
    read = file.bytes - unread + CONTEXT * 2 * 36 * 8 * 128 * 2
    assert found.tokens_per_s == pytest.approx(46e9 / read)


def test_of_the_embedding_of_inputs_of_layers_one_row_is_read() -> None:
    spec, found = known_shape("gemma4:e2b"), catalogue_speed("gemma4:e2b", ON_A_CPU)
    unread = 262_144 * 35 * 256
    read = 2 * (found.parameters - unread) + CONTEXT * token_bytes(spec, torch.bfloat16)
    assert found.tokens_per_s == pytest.approx(46e9 / read)


def test_what_fits_and_crawls() -> None:
    assert catalogue_speed("qwen3:8b", ON_A_CPU).crawls
    assert not catalogue_speed("qwen3:8b-q4", ON_A_CPU).crawls
    assert not catalogue_speed("qwen3:8b", replace(ON_A_CPU, free=GIB)).crawls  # it does not even fit
    assert not catalogue_speed("qwen3:8b", replace(ON_A_CPU, bandwidth=None)).crawls
    assert all(catalogue_speed(name, ON_A_CPU).parameters for name in names())


PARAMETERS = {
    "smollm2": 134_515_008,
    "qwen3:0.6b": 596_049_920,
    "qwen3:1.7b": 1_720_574_976,
    "qwen3:4b": 4_022_468_096,
    "qwen3:8b": 8_190_735_360,
    "qwen3:14b": 14_768_307_200,
    "qwen3:32b": 32_762_123_264,
    "qwen3:30b-a3b": 30_532_122_624,
    "qwen2.5:0.5b": 494_032_768,
    "qwen2.5:1.5b": 1_543_714_304,
    "qwen2.5-coder:1.5b": 1_543_714_304,
    "llama3.2:1b": 1_235_814_400,
    "llama3.2:3b": 3_212_749_824,
    "smollm2:1.7b": 1_711_376_384,
    "smollm3:3b": 3_075_098_624,
    "mistral:7b": 7_241_732_096,
    "gemma2:2b": 2_614_341_888,
    "gemma3:1b": 999_885_952,
    "gemma4:e2b": 4_628_569_379,
    "gemma4:e4b": 7_463_013_418,
    "gemma4:12b": 11_907_350_320,
    "gemma4:26b-a4b": 25_233_141_790,
    "gemma4:31b": 30_697_345_340,
    "phi3:3.8b": 3_821_079_552,
    "phi4-mini:3.8b": 3_836_021_760,
    "granite3.3:2b": 2_533_539_840,
    "granite3.1-moe:1b": 1_334_628_352,
    "granite3.1-moe:3b": 3_298_793_472,
    "granite4:1b": 1_631_750_144,
    "granite4:3b": 3_402_836_480,
    "olmo2:1b": 1_484_916_736,
    "ernie4.5:0.3b": 360_748_032,
    "ministral3:3b": 3_429_006_336,
    "ministral3:8b": 8_489_553_920,
    "ministral3:14b": 13_506_073_600,
    "exaone4:1.2b": 1_279_391_488,
    "exaone4:32b": 32_003_216_384,
    "seed-oss:36b": 36_151_104_512,
    "hunyuan:1.8b": 1_791_080_448,
    "hunyuan:4b": 4_221_757_440,
    "hunyuan:7b": 7_504_568_320,
    "qwen3.5:0.8b": 752_393_024,
    "qwen3.5:4b": 4_205_751_296,
    "qwen3.5:9b": 8_953_803_264,
    "qwen3.5:35b-a3b": 34_660_610_688,
    "command-r:7b": 8_028_033_024,
    "lfm2.5:1.2b": 1_170_340_608,
    "lfm2.5:8b-a1b": 8_467_856_832,
    "gpt2": 124_439_808,
    "gpt-oss:20b": 20_914_757_184,
    "glm4.7-flash": 29_943_393_920,
}
"""As their makers count them."""


def test_the_shapes_of_the_catalogue_have_the_size_of_the_models() -> None:
    assert {name: parameters(known_shape(name)) for name in CONFIGS} == PARAMETERS
    assert {name: speed(name).parameters for name in COMMON} == {name: PARAMETERS[name] for name in COMMON}
    assert speed("smollm2").weight_bytes == 2 * PARAMETERS["smollm2"]


def test_a_file_of_the_catalogue_has_a_plausible_size() -> None:
    for name, file in HUB_FILES.items():
        count = catalogue_speed(name, ON_A_CPU).parameters
        low, high = (8.4, 11.0) if name.endswith("-q8") else (4.5, 6.5)
        assert low < 8 * file.bytes / count < high, name


def test_the_speed_is_that_of_the_program_that_computes_the_network() -> None:
    native = replace(ON_A_CPU, program=PROGRAMS[NATIVE])
    fused = replace(ON_A_GPU, program=PROGRAMS["fused kernels, CUDA graph"])
    plain = known_shape("qwen2.5:0.5b")
    assert (suited(plain, native), suited(plain, fused)) == (native, fused)
    unusual = each_attention(known_shape("gpt2"), lambda _, attention: replace(attention, head_dim=12))
    assert suited(unusual, native).program is PROGRAMS["plain modules, CPU"]
    assert not suited(unusual, native).keeps_blocks
    assert suited(unusual, native, quantized=True).program is PROGRAMS["plain modules, native products"]
    assert suited(unusual, native, quantized=True).keeps_blocks
    assert suited(unusual, fused).program is PROGRAMS["plain modules, CUDA graph"]
    quantized = suited(plain, fused, quantized=True)
    assert quantized.program is PROGRAMS["fused kernels, quantised weights"]
    assert quantized.keeps_blocks
    assert suited(known_shape("qwen3:30b-a3b"), fused, quantized=True) == quantized
    file = catalogue_speed("qwen3:8b-q4", replace(fused, bandwidth=4.2e12, free=128 * GIB))
    assert file.weight_bytes < 6 * GIB
    assert file.tokens_per_s is not None
    assert file.tokens_per_s > 400


def test_of_experts_the_chosen_ones_are_read() -> None:
    sparse, here = known_shape("qwen3:30b-a3b"), replace(ON_A_CPU, keeps_blocks=False, free=128 * GIB)
    found = expected_speed("x", sparse, here)
    assert found.tokens_per_s is not None
    read = 46e9 / found.tokens_per_s - CONTEXT * token_bytes(sparse, torch.bfloat16)
    assert 2 * 2.9e9 < read < 2 * 3.4e9


def test_experts_that_a_gpu_has_no_room_for_are_held_in_host_memory() -> None:
    sparse = known_shape("qwen3:30b-a3b")
    small = Here(torch.device("cuda"), torch.bfloat16, Program(1.0, 0.0), False, 1e12, 24 * GIB, 256 * GIB)
    found = speed_here("x", sparse, small, None)
    assert found.fits
    assert found.context >= 8192
    assert found.tokens_per_s is None
    a_layer = 128 * 3 * 768 * 2048 * 2
    assert found.host_bytes == found.host_layers * a_layer
    assert 23 * GIB > found.weight_bytes - found.host_bytes > 20 * GIB
    packed = speed_here("x", sparse, small, 18 * 10**9)
    assert packed.host_layers
    assert packed.host_bytes < found.host_bytes / 3
    assert not speed_here("x", sparse, replace(small, host_free=20 * GIB), None).fits
    assert not speed_here("x", sparse, replace(small, host_free=None), None).fits
    assert not speed_here("x", sparse, replace(small, free=80 * GIB), None).host_layers


def test_quantized_experts_stay_so_on_a_gpu_whose_kernels_read_them() -> None:
    sparse, fused = known_shape("qwen3:30b-a3b"), PROGRAMS["fused kernels, CUDA graph"]
    here = Here(torch.device("cuda"), torch.bfloat16, fused, False, 1e12, 24 * GIB, 256 * GIB)
    whole = speed_here("x", sparse, here, 17 * 10**9)
    assert not whole.host_layers
    assert whole.weight_bytes == 17 * 10**9
    plain = speed_here("x", sparse, replace(here, free=80 * GIB), None)
    assert whole.tokens_per_s is not None
    assert plain.tokens_per_s is not None
    assert whole.tokens_per_s > 1.5 * plain.tokens_per_s
    less = speed_here("x", sparse, replace(here, free=16 * GIB), 17 * 10**9)
    assert less.host_layers
    assert less.weight_bytes - less.host_bytes < 16 * GIB


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        ((9, 0), None, None),
        ((9, 0), "triton is not installed", "triton is not installed"),
        ((9, 0), "Triton needs a C compiler: install gcc", "Triton needs a C compiler: install gcc"),
        ((7, 5), None, "it needs sm_80 or newer, this GPU is sm_75"),
    ],
)
def test_the_decode_programs_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str | None, reason: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("engine.kernels.on_gpu.triton_problem", lambda device: triton)
    programs = decode_programs(torch.device("cuda"))
    assert [part.reason for part in programs] == [reason, reason, None], "graphs have kernels of ours, too"
    assert {part.name for part in programs} < set(PROGRAMS)


def gpu(capability: str) -> Gpu:
    return Gpu("NVIDIA Test", capability, GIB, 2 * GIB, 1)


def test_advice_is_what_to_install() -> None:
    problem = CudaProblem("this torch was built without CUDA", "To use the GPU: pip install it")
    assert advice(problem, None, (), flash_attn=False, triton=False) == (
        "This torch was built without CUDA. To use the GPU: pip install it",
    )
    assert advice(CudaProblem("no GPU"), None, (), flash_attn=False, triton=False) == ()
    (line,) = advice(CudaProblem("no GPU"), None, (), flash_attn=False, triton=False, no_native="no compiler")
    assert line == "No compiler; torch decodes more slowly, with expanded weights."
    assert advice(None, gpu("sm_90"), (), flash_attn=True, triton=True, no_native="no compiler") == ()
    assert advice(None, gpu("sm_90"), (), flash_attn=True, triton=True) == ()
    lines = advice(None, gpu("sm_120"), (), flash_attn=False, triton=False)
    assert [line.split()[0] for line in lines] == ["Triton", "flash-attn"]
    (line,) = advice(
        None,
        gpu("sm_90"),
        (),
        flash_attn=True,
        triton=True,
        no_triton="Triton needs a C compiler: install gcc",
    )
    assert line.startswith("Triton needs a C compiler: install gcc. Until then nothing is fused")
    (line,) = advice(CudaProblem("no GPU"), None, (), flash_attn=False, triton=True, unused_cuda=True)
    assert line.endswith(
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
    )
    (line,) = advice(None, replace(gpu("gfx1100"), is_amd=True), (), flash_attn=False, triton=True)
    assert "plain PyTorch" in line
    (old,) = advice(None, gpu("sm_75"), (), flash_attn=False, triton=False)
    assert "sm_80" in old
    features = (
        MachineFeature("flash", "flash-attn is installed but does not work (OSError: x)"),
        MachineFeature("sdpa", None),
    )
    (line,) = advice(None, gpu("sm_90"), features, flash_attn=True, triton=True)
    assert line == "Reinstall what is broken: flash-attn is installed but does not work (OSError: x)"


def test_this_machine_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_READ_BYTES", 2**26)
    found = inspect_machine()
    assert found.failures == ()
    assert found.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found.packages["torch"] == torch.__version__
    assert found.memory_free is not None
    assert found.memory_total is not None
    assert 0 < found.memory_free <= found.memory_total
    assert found.cpu is not None
    assert found.cpu.cores > 0
    assert {*COMMON} <= {entry.name for entry in found.speeds} <= {*names()}
    assert all(entry.tokens_per_s for entry in found.speeds)
    assert {feature.name for feature in found.attention} == {"flash", "triton", "sdpa"}
    assert json.loads(json.dumps(asdict(found)))["speeds"][1]["name"] == "qwen3:0.6b"


def test_every_probe_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("the driver\nfell over")

    probes = (
        "cuda_problem",
        "driver_cuda",
        "available_memory",
        "measure_bandwidth",
        "decode_programs",
        "_attention",
        "_cpu",
        "_memory_total",
        "driver_version",
        "_packages",
    )
    for name in probes:
        monkeypatch.setattr(machine_module, name, fail)
    found = inspect_machine()
    assert len(found.failures) == len(probes)
    assert all(line.endswith("could not be determined: the driver fell over") for line in found.failures)
    assert (found.device, found.gpu, found.cpu, found.bandwidth) == ("cpu", None, None, None)
    assert all(entry.tokens_per_s is None and entry.context == 0 for entry in found.speeds)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
    ],
)
def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch, text: str, version: str) -> None:
    monkeypatch.setattr(device_module, "lines", lambda path: [text])
    assert device_module.driver_version() == version


def test_a_driver_tool_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device_module, "lines", lambda path: [])
    with pytest.raises(Exception, match="nvidia-smi says: NVIDIA-SMI has failed"):
        device_module.driver_version()
    tool.write_text("#!/bin/sh\necho 580.65.06\n")
    assert device_module.driver_version() == "580.65.06"


def test_looking_at_a_machine_needs_no_screen() -> None:
    screens = "('textual', 'rich', 'transformers')"
    code = f"import sys, engine.machine.report; sys.exit(any(m in sys.modules for m in {screens}))"
    folder = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder).returncode == 0
