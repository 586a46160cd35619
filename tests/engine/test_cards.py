"""What GPUs of every size hold, planned before anything is read. No GPU is needed."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

import models.loading.load
import models.loading.plan
from benchmarks.repeating import write_repeating
from engine import Engine, EngineError
from engine import engine as engine_module
from engine.cache.computing import CHUNK_PART, LEAST_ROWS, MOST_ROWS, chunk_bytes, prefill_rows
from engine.cache.kv_needs import KVNeeds
from engine.cache.sizing import (
    BRANCH_SHARE,
    GPU_SHARE,
    SHORT_CONTEXT,
    KVPlan,
    expected_plan,
    least_beside,
    plan_chunks,
    plan_kv,
)
from engine.device import DeviceChoice
from engine.errors import OutOfRoomError
from engine.machine.expected import PROGRAMS, Here, speed_here
from engine.machine.shapes import known_shape
from models.errors import TooLargeError
from models.loading.load import load_model
from models.loading.plan import Target, needed_bytes, plan_load
from models.weights.block_formats import Kind
from models.weights.memory import available_bytes
from models.weights.slots import parameters, slots
from models.weights.too_large import Beside, too_large
from tests.models.checkpoints import files_of, random_model, tiny_llama, write_gguf

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
GIB = 1 << 30
CARDS = (6, 8, 12, 16, 24, 48, 80, 141)
EIGHT = known_shape("qwen3:8b")
IN_Q4 = needed_bytes(
    EIGHT, BF16, EIGHT.max_positions, {}, {s: Kind.Q4_K for s in slots(EIGHT) if s.is_matrix}
)
TOKEN = 36 * 2 * 8 * 128 * 2


def free_of(card: int) -> int:
    """The desktop and CUDA take a GiB."""
    return (card - 1) * GIB


@pytest.mark.parametrize(
    ("card", "context", "gigabytes"),
    [
        (8, 12_544, 1.9),  # all that fits
        (12, 38_784, 5.7),
        (16, 40_960, 7.6),  # the model's context, and a quarter of one for branches
        (24, 40_960, 7.6),
        (48, 40_960, 12.1),  # two contexts take less than a third of it
        (80, 40_960, 12.1),
        (141, 40_960, 12.1),
    ],
)
def test_the_cache_of_one_chat_with_an_8b_model_in_4_bits(card: int, context: int, gigabytes: float) -> None:
    plan = expected_plan(EIGHT, BF16, CUDA, free_of(card), IN_Q4)
    assert plan.context_length == context
    assert plan.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert plan.share == pytest.approx(plan.nbytes / (free_of(card) - IN_Q4))
    assert plan.nbytes <= GPU_SHARE * (free_of(card) - IN_Q4)


@pytest.mark.parametrize(("card", "fits"), [(6, False), *((card, True) for card in CARDS[1:])])
def test_an_8b_model_in_4_bits_is_refused_where_no_conversation_fits_beside_it(card: int, fits: bool) -> None:
    beside = least_beside(EIGHT, BF16, CUDA, None, short=SHORT_CONTEXT)
    assert beside.tokens == SHORT_CONTEXT
    assert (IN_Q4 + beside.nbytes <= free_of(card)) is fits


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("streams", [1, 2, 8, 64])
def test_no_card_loses_streams_to_the_share_of_branches(card: int, streams: int) -> None:
    """Every stream has its context wherever it had one, and branches have a quarter of one at least."""
    left = free_of(card) - 2 * GIB
    given = {"streams": streams, "share": GPU_SHARE}
    plan = plan_kv(KVNeeds(TOKEN), left, 40_960, None, **given, branches=BRANCH_SHARE)  # type: ignore[arg-type]
    full = plan_kv(KVNeeds(TOKEN), left, 40_960, None, **given)  # type: ignore[arg-type]
    assert plan.context_length == full.context_length
    whole = min(full.num_blocks, 32 + (streams * plan.context_length + plan.context_length // 4) // 32)
    assert whole - 32 <= plan.num_blocks <= full.num_blocks
    if 3 * (streams + 1) * plan.context_length * TOKEN < GPU_SHARE * left:
        assert plan.num_blocks == full.num_blocks


@pytest.mark.parametrize("name", ["qwen3:0.6b", "qwen3:8b", "qwen3:14b", "qwen3:30b-a3b", "gpt-oss:20b"])
def test_the_activations_of_a_chunk_are_a_sensible_part_of_the_card(name: str) -> None:
    spec = known_shape(name)
    rows = [prefill_rows(spec, BF16, CUDA, free_of(card)) for card in CARDS]
    assert all(few <= more for few, more in pairwise(rows))
    assert (
        rows[CARDS.index(16) :] == [MOST_ROWS] * 5
    )  # cards of 16 GB and more compute as much at once as ever
    for card, count in zip(CARDS, rows, strict=True):
        assert count == LEAST_ROWS or CHUNK_PART * chunk_bytes(spec, count, 2) <= free_of(card)
    assert prefill_rows(spec, BF16, CPU, 1) == 512


def test_a_card_of_6_gb_computes_fewer_rows_at_once() -> None:
    assert prefill_rows(EIGHT, BF16, CUDA, free_of(6)) == 2048
    assert prefill_rows(known_shape("qwen3:0.6b"), BF16, CUDA, free_of(6)) == MOST_ROWS


@pytest.mark.parametrize(
    ("name", "rows", "measured"),
    [
        ("qwen3:0.6b", 4096, 128),
        ("qwen3:4b", 4096, 325),
        ("qwen3:8b", 512, 55),
        ("qwen3:8b", 4096, 438),
        ("qwen3:14b", 4096, 598),
    ],
)
def test_the_estimate_is_near_what_a_chunk_was_measured_to_take(name: str, rows: int, measured: int) -> None:
    """In MB: the tensors that are alive at once, of two layers in bf16."""
    assert chunk_bytes(known_shape(name), rows, 2) / 1e6 == pytest.approx(measured, rel=0.15)


def test_chunks_are_halved_where_the_context_would_be_useless_beside_them() -> None:
    def plan(rows: int) -> KVPlan:
        return plan_kv(KVNeeds(1000), 10_000_000, 40_960, None, 1.0, reserve=2000 * rows)

    assert plan_chunks(plan, 1024, 512)[1] == 512
    assert plan_chunks(plan, 1024, 512, useful=7000)[1] == 1024
    assert plan_chunks(plan, 8192, 512, useful=1000)[1] == 4096  # 8192 do not fit at all
    with pytest.raises(OutOfRoomError):
        plan_chunks(plan, 8192, 8192)


# --- before anything is read


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        models.loading.load._Filling, "allocate", lambda *_: pytest.fail("memory was allocated")
    )


@pytest.mark.usefixtures("unread")
def test_a_model_without_room_for_a_conversation_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_llama(
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        attention_bias=True,
    )
    files = files_of(write_gguf(tmp_path / "model.gguf", random_model(config), GGMLQuantizationType.Q8_0))
    weights: list[int] = []

    def refusal(beside: Beside, more: int) -> str:
        monkeypatch.setattr(models.loading.load, "available_bytes", lambda _: sum(weights) + more)
        with pytest.raises(TooLargeError) as caught:
            load_model(files, dtype=BF16, device=CPU, needs=lambda _: beside)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    refusal(Beside(), 0)
    plan = plan_load(files, Target(BF16, CPU))
    spec = plan.spec
    weights.append(plan.nbytes)
    line = refusal(Beside(300_000, 64_000, 16), 363_999)
    assert ", 300 kB to compute with and 64 kB for a context of 16 tokens, but" in line
    assert f"(about {parameters(spec) / 1e6:.0f} million parameters in Q8_0)" in line
    assert "--context" not in line
    asked = Beside(300_000, 64_000_000, 16_000, is_asked=True)
    assert "use --context 3936 or less" in refusal(asked, 300_000 + 16_000_000)
    assert refusal(asked, 300_000).endswith("free; choose a smaller model, or free some memory.")


def test_what_fits_is_told_in_the_format_of_the_file_or_in_16_and_4_bits() -> None:
    def told(kind: str | None, needed: int) -> str:
        return too_large(EIGHT, needed, Beside(10**9), 5_400_000_000, BF16, CUDA, kind, 30 * 10**9)

    q4, plain = told("Q4_K", IN_Q4), told(None, 2 * parameters(EIGHT))
    assert "at most 4.4 GB (about 7.6 billion parameters in Q4_K)" in q4
    assert "(about 2.2 billion parameters fit in 16 bits, 7.3 billion in a file of 4 bits)" in plain
    for line in (q4, plain):
        assert "use --device cpu, where 30 GB are free" in line


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and a GPU whose memory is nearly full."""
    monkeypatch.setattr(
        engine_module, "pick_device", lambda name: DeviceChoice(CUDA if name != "cpu" else CPU)
    )
    monkeypatch.setattr(engine_module, "pick_dtype", lambda name, device: BF16)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    available = available_bytes
    for module in (models.loading.load, models.loading.plan):
        monkeypatch.setattr(module, "available_bytes", lambda d: 10**6 if d.type == "cuda" else available(d))
    monkeypatch.setattr(engine_module, "available_memory", lambda d: 10**6 if d.type == "cuda" else 10**9)
    for module in ("engine.execute.loading", "engine.device"):
        monkeypatch.setattr(f"{module}.available_memory", lambda d: 10**6 if d.type == "cuda" else 10**9)
    monkeypatch.setattr("engine.execute.loading.packs", lambda dtype, device: None)
    write_repeating(tmp_path / "small", hidden=32)
    return tmp_path / "small"


def test_auto_takes_the_cpu_with_a_line_where_the_gpu_has_no_room(on_a_gpu: Path) -> None:
    engine = Engine.load(str(on_a_gpu), context=64)
    try:
        assert engine.device.type == "cpu"
        (note,) = (note for note in engine.figures().notes if "CPU" in note)
        assert "of memory on cuda" in note
        assert "but 1.0 MB are free, so it runs on the CPU, at about " in note
        assert note.endswith(" tokens/s.")
        assert list(engine.stream([5, 6, 7]))
    finally:
        engine.close()


def test_a_gpu_that_was_asked_for_is_refused_with_the_sizes(on_a_gpu: Path, unread: None) -> None:
    with pytest.raises(
        TooLargeError, match=r"on cuda, .* to compute with .* but 1.0 MB are free; .*--device cpu"
    ):
        Engine.load(str(on_a_gpu), device="cuda", context=64)


def test_where_neither_has_room_the_gpu_s_line_is_told(
    on_a_gpu: Path, unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.loading.load, "available_bytes", lambda device: 1000)
    with pytest.raises(TooLargeError, match="of memory on cuda"):
        Engine.load(str(on_a_gpu), context=64)


def test_what_is_told_of_a_model_is_what_loading_it_does() -> None:
    cpu = Here(CPU, BF16, PROGRAMS["plain modules, CPU"], True, 40e9, 30 * GIB)
    program = PROGRAMS["fused kernels, CUDA graph"]
    for card in CARDS:
        here = Here(CUDA, BF16, program, False, 400e9, free_of(card), or_cpu=cpu)
        found = speed_here("qwen3:8b-q4", EIGHT, here, IN_Q4)
        assert found.fits
        assert found.on_cpu is (card == 6)
        if not found.on_cpu:
            plan = expected_plan(EIGHT, BF16, CUDA, free_of(card), IN_Q4)
            assert (found.context, found.kv_bytes, found.kv_share) == (
                plan.context_length, plan.nbytes, plan.share,
            )  # fmt: skip
    asked = Here(CUDA, BF16, program, False, 400e9, free_of(4))
    assert not speed_here("qwen3:8b-q4", EIGHT, asked, IN_Q4).fits


def test_a_context_that_was_asked_for_makes_room_by_smaller_chunks() -> None:
    few, many = (expected_plan(EIGHT, BF16, CUDA, free_of(8), IN_Q4, context) for context in (None, 14_000))
    assert few.context_length < many.context_length == 14_000
    with pytest.raises(EngineError, match=r"Use --context \d+ or less"):
        expected_plan(EIGHT, BF16, CUDA, free_of(8), IN_Q4, 30_000)
