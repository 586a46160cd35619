"""Steps whose kernels are cut as a tuner may choose, and what times them, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from collections.abc import Callable, Sequence

from engine.cache.kv_cache import KVCache
from engine.execute.cuda import step_bench
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import KernelConfigs, describe, fitted, numbers, weight_room
from engine.execute.cuda.step_bench import StepBench
from engine.execute.cuda.tiles import LANES, AttentionSplit, Tile
from engine.execute.cuda.tuner import every, tune
from engine.execute.tuning.store import TABLES, load_table
from engine.machine.shapes import CONFIGS, known_shape
from models.loading.load import load_model
from models.network import Network
from models.spec import FeedForward
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS
from tests.engine.kernels.test_rows import DEVICE, Case
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Network:
    config = tiny_qwen3(
        num_hidden_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        intermediate_size=256,
        vocab_size=24,
    )
    return load_model(
        files_of(write_checkpoint(tmp_path_factory.mktemp("tuned"), config)),
        dtype=torch.float32,
        device=DEVICE,
    )


def test_whatever_is_chosen_rows_have_the_bits_that_they_have_alone_and_nearly_those_of_the_tables(
    model: Network,
) -> None:
    case = Case(model, [3, 200])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False)
    usual, cache = case.run(decoder, [1, 0], 2)
    known = {name: tuple(map(numbers, cuts)) for name, cuts in decoder.cuts.candidates.items()}
    assert sum("attention" in name for name in known) == 1
    assert all(len(cuts) > 1 for cuts in known.values())
    for chosen in every(known)[1::3]:
        decoder.cuts = KernelConfigs(chosen=chosen)
        logits, written = case.run(decoder, [1, 0], 2)
        torch.testing.assert_close(logits, usual, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(written, cache, rtol=1e-3, atol=1e-3)
        for place, slot in enumerate([1, 0]):
            assert torch.equal(case.run(decoder, [slot], 1)[0][0], logits[place]), chosen


class Watch:
    """A stopwatch by which steps take as long as it says, and one cut works nowhere."""

    def __init__(self, seconds: Callable[[KernelConfigs], float]) -> None:
        self.seconds_of, self.bench, self.steps = seconds, None, 0

    def record(self, step: Callable[[], object]) -> float:
        if self.steps < 2:  # more would take long in the interpreter, and be nothing else
            step()
        self.steps += 1
        assert isinstance(self.bench, StepBench)
        program = self.bench._program
        assert program is not None
        return self.seconds_of(program.cuts)

    def seconds(self, recordings: Sequence[float]) -> list[float]:
        return list(recordings)


def test_steps_are_timed_beside_the_cache_of_the_sequences_and_the_fastest_is_found(
    model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = model.spec.attention
    cache = KVCache.uniform(1, 3, 256, shape.kv_heads, shape.head_dim, torch.float32, DEVICE)
    cache.kv.fill_(7.0)

    def seconds(cuts: KernelConfigs) -> float:
        qkv = cuts.product(1, sum_of_heads, 256, False, None)
        assert isinstance(qkv, Tile)
        if qkv.warps == 2 and qkv.tiles == 1:
            raise RuntimeError("out of resource: shared memory")
        split = cuts.split(1, shape, 64, False, True)
        return 1e-3 * (0.9 if qkv.tiles == 2 else 1.0) * (0.9 if split and split.tensor_cores else 1.0)

    sum_of_heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    watch = Watch(seconds)
    bench = watch.bench = StepBench(model, cache, lambda job: job(), None, watch)
    monkeypatch.setattr(step_bench, "ROW", 20)
    ran = FusedDecoder.run
    monkeypatch.setattr(
        FusedDecoder, "run", lambda self, rows, limit: ran(self, rows, limit) if watch.steps < 2 else None
    )
    known = {0: {}, 1: bench.candidates(1), 16: {}}
    monkeypatch.setattr(bench, "candidates", known.__getitem__)
    found = tune(bench, "tiny", lambda: True)
    assert (cache.kv == 7.0).all()
    qkv, attention = (
        f"1 to 8 rows: {sum_of_heads} x 256",
        f"1 to 8 rows: attention {shape.heads} / {shape.kv_heads} x 64",
    )
    assert set(found.chosen) == {qkv, attention}
    assert (found.chosen[qkv][2], found.chosen[attention][0]) == (2, 1)
    assert found.seconds == {"1": pytest.approx((1e-3, 0.81e-3))}
    bench.close()


@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_sequences_of_the_bench_read_rows_of_their_own(
    model: Network, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """Rows that all of them read would come from the cache of the GPU, as they do in no real step."""
    shape, seen = model.spec.attention, list[list[int]]()
    like = KVCache.uniform(1, 3, 256, shape.kv_heads, shape.head_dim, torch.float32, DEVICE)

    def run(self: FusedDecoder, rows: int, limit: int) -> None:
        assert int(self._given.tables[0].max()) < len(self._attention._cache.kv[0, 0]) // 256
        seen.extend(self._given.tables[0][:rows].tolist())

    monkeypatch.setattr(FusedDecoder, "run", run)
    bench = StepBench(model, like, lambda job: job(), None, Watch(lambda _: 1.0), sequences=sequences)
    bench.candidates(8)
    assert len(seen) == 8
    assert len(set(map(tuple, seen))) == sequences
    assert len({block for table in seen for block in table}) == sequences * len(seen[0])
    bench.close()


def test_what_is_no_candidate_is_not_taken() -> None:
    usual = KernelConfigs().product(1, 4096, 1024, False, None)
    name = "1 to 8 rows: 4096 x 1024"
    for wrong in ((3, 5, 7, 9, 1), (1, 4), (), (1, 4, 1, 1000, 1), (0, 0, 0, 0, 0)):
        assert KernelConfigs(chosen={name: wrong}).product(1, 4096, 1024, False, None) == usual
    many = KernelConfigs().product(16, 4096, 1024, False, None)
    right = KernelConfigs(chosen={name: (1, 8, 2, 2, 1)})
    assert Tile(1, 8, 2, 2) not in (usual, many)
    assert right.product(8, 4096, 1024, False, None) == Tile(1, 8, 2, 2)
    assert right.product(16, 4096, 1024, False, None) == many, "more rows have choices of their own"
    assert right.product(1, 4096, 1024, True, None) != Tile(1, 8, 2, 2)
    assert right.product(1, 4096, 1024, False, Kind.Q4_0) == KernelConfigs().product(
        1, 4096, 1024, False, Kind.Q4_0
    )


@pytest.mark.parametrize("room", [227 << 10, 113 << 10, 50 << 10, 30 << 10, 8 << 10])
def test_up_to_eight_rows_have_the_warps_and_lanes_of_one(room: int) -> None:
    several = 0
    names = [name for name in load_table().chosen if name.split()[-1] in Kind.__members__]
    shapes = {name.partition(": ")[2] for name in names if name.startswith("1 to 8")}
    own = {name.partition(": ")[2] for name in names if not name.startswith("1 to 8")}
    for shape in (*shapes, "4096 x 4096 Q5_K"):
        outputs, _, inputs, *gated, kind = shape.split()
        asked = int(outputs), int(inputs), bool(gated), Kind[kind]
        cuts = [KernelConfigs(room).product(rows, *asked) for rows in range(1, 9)]
        several += len(set(cuts)) > 1
        assert len({(cut.warps, cut.lanes) for cut in cuts}) == 1, shape
    assert own <= shapes
    if room > 100 << 10:  # with less, tiles that do not fit may become the same
        assert several == len(own) == 5
    chosen = KernelConfigs(room, {"1 to 8 rows: 12288 x 4096 gated Q4_K": (1, 8, 1, 2, LANES)})
    assert len({chosen.product(rows, 12288, 4096, True, Kind.Q4_K) for rows in range(1, 9)}) == 1


CAPABILITIES = {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}


def test_each_kind_of_gpu_has_a_table() -> None:
    tables = {path.stem for path in TABLES.glob("sm_*.json")}
    assert tables == {f"sm_{major}{minor}" for major, minor in CAPABILITIES}
    assert all(load_table(name).room for name in tables)
    assert load_table("sm_87") == load_table()


@pytest.mark.parametrize("capability", sorted(CAPABILITIES), ids=str)
def test_every_kind_of_gpu_begins_with_what_fits_there(capability: tuple[int, int]) -> None:
    kilobytes = {(8, 0): 164, (9, 0): 228, (10, 0): 228}.get(capability, 100)
    room = weight_room(capability, kilobytes << 10)
    assert room < kilobytes << 10
    for name in CONFIGS:
        spec = known_shape(name)
        feeds = [layer.feed_forward for layer in spec.layers]
        inner = next((feed.size for feed in feeds if isinstance(feed, FeedForward)), 512)
        shapes = [
            (spec.hidden_size, inner, False),
            (inner, spec.hidden_size, True),
            (spec.vocab_size, spec.hidden_size, False),
        ]
        for outputs, inputs, gated in shapes:
            cuts = KernelConfigs(room, most=(kilobytes - 1) << 10)
            measured = KernelConfigs(1 << 30)
            tile = cuts.product(1, outputs, inputs, gated, None)
            assert tile.shared(inputs, None) <= room
            if capability == (9, 0):
                assert tile == measured.product(1, outputs, inputs, gated, None)
            for kind in BLOCKS:
                packed = cuts.product(1, outputs, inputs, gated, kind)
                assert packed.shared(inputs, kind) <= room
                if capability == (9, 0):
                    assert packed == measured.product(1, outputs, inputs, gated, kind)
            assert all(
                cut.shared(inputs, kind) < kilobytes << 10
                for name, known in cuts.candidates.items()
                for kind in (Kind.__members__.get(name.split()[-1]),)
                for cut in known
                if isinstance(cut, Tile)
            )


def test_a_gpu_that_nobody_knows_begins_as_its_shared_memory_says() -> None:
    assert weight_room((8, 7), 164 << 10) == 80 << 10
    assert weight_room((12, 1), 100 << 10) == 48 << 10
    for room in (1, 5000, 48 << 10):  # too small for anything: as small as it gets, and no endless loop
        assert fitted(Tile(1, 16, 2, 6), 12_288, None, room).warps >= 1
        assert fitted(Tile(1, 16, 4, 8), 12_288, Kind.Q8_0, room).warps >= 1


def test_choices_are_told_in_words() -> None:
    assert (
        describe("1 to 8 rows: 4096 x 1024", numbers(Tile(2, 8, 1, 3))) == "2 folds, 8 warps, 1 tile, 3 ahead"
    )
    assert describe("1 to 8 rows: 4096 x 1024 Q4_0", numbers(Tile(1, 4, 2, 2))) == "4 warps, 2 tiles, 2 ahead"
    in_lanes = describe("1 to 8 rows: 4096 x 1024 Q4_0", numbers(Tile(1, 8, 1, 2, 4)))
    assert in_lanes == "8 warps, 1 tile, 2 ahead, 4 lanes"
    assert (
        describe("1 to 8 rows: attention 16 / 8 x 128", numbers(AttentionSplit(True, 64, 2)))
        == "128 rows a part, tensor cores"
    )
