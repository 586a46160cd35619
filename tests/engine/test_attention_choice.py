"""Which attention backend is taken, and what is said when one does not work."""

import sys
from pathlib import Path

import pytest
import torch

from engine.attention import choose
from engine.attention.choose import AttentionChoice, choose_attention, make_backend, usable_backends
from engine.attention.unusual import kinds, on_trial
from engine.cache.kv_cache import KVCache
from engine.errors import EngineError
from models.spec import Attention, Rope
from tests.engine import fake_flash

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """What the GPU says it is; without a GPU only what comes before the first tensor on it can be reached."""
    said = {"is": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: said["is"])
    return said


@pytest.fixture
def no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", None)


@pytest.fixture
def broken_flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A flash-attn that is installed and fails to import."""
    (tmp_path / "flash_attn_2_cuda.py").write_text(request.param)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_2_cuda", raising=False)


def test_a_cpu_takes_sdpa_and_says_nothing() -> None:
    assert choose_attention("auto", CPU, torch.bfloat16, 64) == AttentionChoice("sdpa", 32)
    assert choose_attention("sdpa", CPU, torch.float32, 64) == AttentionChoice("sdpa", 32)
    assert usable_backends(CPU) == [
        ("flash", "it needs an NVIDIA GPU"),
        ("triton", "it needs an NVIDIA GPU"),
        ("sdpa", None),
    ]


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_what_was_asked_for_and_does_not_work_is_one_line(name: str) -> None:
    with pytest.raises(EngineError, match=f"^--attention {name} cannot be used: it needs an NVIDIA GPU. Use"):
        choose_attention(name, CPU, torch.float32, 64)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        EngineError, match="Unknown attention backend 'xformers'; it must be auto, flash, triton or sdpa"
    ):
        choose_attention("xformers", CPU, torch.float32, 64)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Attention(4, 2, 128), "attention heads that differ from layer to layer"),
        (Attention(4, 2, 64, kv_from=0), "layers that read the keys and values of other layers"),
    ],
)
def test_flash_attends_only_to_rows_of_one_format(other: Attention, said: str) -> None:
    with pytest.raises(
        EngineError, match=f"--attention flash cannot be used: flash-attn is not used for {said}"
    ):
        choose_attention("flash", CUDA, torch.bfloat16, 64, (Attention(4, 2, 64), other))


def test_an_old_gpu_takes_sdpa(capability: dict[str, tuple[int, int]]) -> None:
    capability["is"] = (7, 5)
    assert choose_attention("auto", CUDA, torch.float16, 64) == AttentionChoice("sdpa", 32)
    reasons = dict(usable_backends(CUDA))
    assert reasons["flash"] == reasons["triton"] == "this GPU has compute capability 7.5, and it needs 8.0"
    with pytest.raises(EngineError, match=r"compute capability 7\.5, and it needs 8\.0"):
        choose_attention("triton", CUDA, torch.float16, 64)


@pytest.mark.usefixtures("capability", "broken_flash")
@pytest.mark.parametrize(
    ("broken_flash", "said"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart"),
        ("raise ImportError('undefined symbol: _ZN3c10\\nmore')", "ImportError: undefined symbol: _ZN3c10)"),
        ("raise RuntimeError", "RuntimeError: )"),
        ("import of_what_it_needs", "ModuleNotFoundError: No module named 'of_what_it_needs'"),
    ],
    indirect=["broken_flash"],
)
def test_a_broken_flash_attn_is_said_once_and_something_else_is_used(said: str) -> None:
    choice = choose_attention("auto", CUDA, torch.bfloat16, 64)
    assert choice.name in ("triton", "sdpa")
    assert choice.note is not None
    assert "\n" not in choice.note
    assert choice.note.startswith(
        f"Attention uses {choice.name} because flash-attn is installed but does not work"
    )
    assert said in choice.note
    with pytest.raises(
        EngineError, match="--attention flash cannot be used: flash-attn is installed but does not"
    ):
        choose_attention("flash", CUDA, torch.bfloat16, 64)


@pytest.mark.usefixtures("capability", "no_flash")
def test_a_missing_flash_attn_is_no_news_but_asking_for_it_says_how_to_install_it() -> None:
    choice = choose_attention("auto", CUDA, torch.bfloat16, 64)
    assert choice.name != "flash"
    assert "flash" not in (choice.note or "")
    assert dict(usable_backends(CUDA))["flash"] == "flash-attn is not installed"
    with pytest.raises(
        EngineError, match=r"flash-attn is not installed\. Install it with: pip install 'flash-attn"
    ):
        choose_attention("flash", CUDA, torch.bfloat16, 64)


@pytest.mark.usefixtures("capability")
def test_flash_is_not_for_fp32() -> None:
    with pytest.raises(EngineError, match="flash-attn computes in bfloat16 or float16 only"):
        choose_attention("flash", CUDA, torch.float32, 64)


def test_a_flash_attn_that_computes_nonsense_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    assert choose._tried("flash", CPU, torch.bfloat16, 64) is None
    monkeypatch.setattr(fake_flash, "plain", lambda q, *_, **asked: torch.zeros_like(q))
    problem = choose._tried("flash", CPU, torch.bfloat16, 64)
    assert problem is not None
    assert "its results are wrong (relative error 1.0e+00)" in problem.why


@pytest.mark.parametrize("part", ["window", "scale", "cap"])
def test_a_flash_attn_that_ignores_what_a_layer_asks_for_is_found_out(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    asked = kinds([Attention(8, 4, 64), Attention(8, 4, 64, window=4096, scale=0.5, score_cap=2.0)])
    assert choose._tried("flash", CPU, torch.bfloat16, 64, asked) is None
    exact = fake_flash.plain
    monkeypatch.setattr(fake_flash, "plain", lambda *qkv, **asked: exact(*qkv, **asked | {part: None}))
    problem = choose._tried("flash", CPU, torch.bfloat16, 64, asked)
    assert problem is not None
    assert "its results are wrong" in problem.why


@pytest.mark.usefixtures("capability")
def test_attention_with_sinks_is_not_for_flash() -> None:
    asked = (Attention(8, 4, 64, sinks=True),)
    with pytest.raises(
        EngineError, match="--attention flash cannot be used: flash-attn does not support attention"
    ):
        choose_attention("flash", CUDA, torch.bfloat16, 64, asked)
    assert choose._problem("flash", CUDA, torch.bfloat16, 64, asked) == choose._Problem(
        "flash-attn does not support attention sinks", broken=False
    )


@pytest.mark.usefixtures("capability")
def test_unusual_attention_in_fp32_is_torchs() -> None:
    asked = (Attention(8, 4, 64), Attention(8, 4, 64, window=9))
    assert choose_attention("auto", CUDA, torch.float32, 64, asked) == AttentionChoice("sdpa", 32)
    with pytest.raises(EngineError, match="--attention triton cannot be used: its kernel for this model's"):
        choose_attention("triton", CUDA, torch.float32, 64, asked)


def test_layers_of_the_same_kind_are_tried_once() -> None:
    layers = [
        Attention(8, 4, 64, window=window, rope=rope, sinks=sinks)
        for window in (None, 512)
        for rope in (None, Rope())
        for sinks in (False, True)
    ]
    found = kinds(layers)
    assert len(found) == 4
    trials = [on_trial(spec, CPU, torch.float32) for spec in found]
    assert {trial.spec.window for trial in trials} == {None, 8}
    assert [trial.sinks is not None for trial in trials] == [spec.sinks for spec in found]


def test_the_choice_makes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    for name, size in choose.BLOCK_SIZES.items():
        cache = KVCache.uniform(1, 2, size, 1, 16, torch.float32, CPU)
        assert make_backend(name, cache).name == name
