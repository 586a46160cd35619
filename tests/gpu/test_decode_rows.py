"""Steps of many rows on a GPU, at every length at which sequences are cut differently: bits, graphs, the reference."""

from random import Random

import pytest
import torch
from torch import Tensor

from engine.cache.block_table import BlockTable
from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows
from engine.execute.cuda.decode_runner import DecodeRunner, make_decode_runner
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.prefix_groups import choose_sharing, share
from engine.execute.cuda.tiles import context_limit
from engine.params import SamplingParams
from engine.schedule.sequence import Priority, Sequence
from models.loading.load import load_model
from models.network import Network
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

GPU = torch.device("cuda")
BLOCK, MOST, SLOTS = 32, 24_000, 40
LENGTHS = [1300, 3, 639, 640, 1279, 1280, 2600, 700, 10_239, 10_240, 20_479, 20_480]
CONFIGS = {
    "qwen3": tiny_qwen3(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MOST,
    ),
    "llama": tiny_llama(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        attention_bias=True,
        max_position_embeddings=MOST,
    ),
    "heads of 64": tiny_llama(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=MOST,
    ),
    "tensor cores": tiny_qwen3(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MOST,
    ),
    "wide": tiny_qwen3(
        vocab_size=512,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MOST,
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = write_checkpoint(tmp_path_factory.mktemp("rows"), CONFIGS[request.param], dtype=torch.bfloat16)
    return load_model(files_of(folder), dtype=torch.bfloat16, device=GPU)


@pytest.fixture(scope="module")
def cache(network: Network) -> KVCache:
    heads = network.spec.attention
    blocks = sum(length // BLOCK + 40 for length in LENGTHS) + SLOTS * 60
    cache = KVCache.uniform(
        len(network.spec.layers), blocks, BLOCK, heads.kv_heads, heads.head_dim, torch.bfloat16, GPU
    )
    cache.kv.normal_(generator=torch.Generator(GPU).manual_seed(1))
    return cache


def tables(cache: KVCache, lengths: list[int]) -> list[list[int]]:
    """Return scattered blocks for sequences of these lengths, with room for 40 more rows of each."""
    free = torch.randperm(cache.kv.shape[2] // BLOCK, generator=torch.Generator().manual_seed(2)).tolist()
    return [[free.pop() for _ in range((length + 40) // BLOCK + 1)] for length in lengths]


def runner_of(
    network: Network,
    cache: KVCache,
    graphs: bool = True,
    fused: bool = True,
    on_host: HostExperts | None = None,
) -> DecodeRunner:
    return make_decode_runner(
        network, cache, "triton", MOST, SLOTS, Graphs() if graphs else None, fused, on_host=on_host
    )


def placed(runner: DecodeRunner, cache: KVCache, lengths: list[int]) -> None:
    """Place a sequence of each length in the slot of its number."""
    runner.slots.given.token.copy_(torch.arange(SLOTS) * 7 % 512)
    for slot, (length, blocks) in enumerate(zip(lengths, tables(cache, lengths), strict=True)):
        runner.slots.put(slot, length, length)
        runner.slots.show(slot, blocks)


def logits_of(runner: DecodeRunner, slots: list[int], lengths: list[int]) -> Tensor:
    return runner.logits(slots, max(lengths[slot] for slot in slots))


def test_up_to_eight_rows_get_the_bits_that_each_gets_alone(network: Network, cache: KVCache) -> None:
    runner, random = runner_of(network, cache), Random(0)
    placed(runner, cache, LENGTHS)
    alone = [logits_of(runner, [slot], LENGTHS)[0] for slot in range(len(LENGTHS))]
    for count in (2, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 8):
        slots = random.sample(range(len(LENGTHS)), count)
        together = logits_of(runner, slots, LENGTHS)
        for row, slot in enumerate(slots):
            assert torch.equal(together[row], alone[slot]), (LENGTHS[slot], [LENGTHS[s] for s in slots])


@pytest.mark.parametrize("count", [1, 3, 8, 12, 40])
def test_rows_give_what_the_plain_modules_give(network: Network, cache: KVCache, count: int) -> None:
    lengths = (LENGTHS[:8] * 5)[:count] if count != 12 else LENGTHS
    fused, plain = runner_of(network, cache), runner_of(network, cache, fused=False)
    found = []
    for runner in (fused, plain):
        placed(runner, cache, lengths)
        found.append(logits_of(runner, list(range(count)), lengths).float())
    error = (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)
    print(f"{count} rows: {error.max():.2e}")
    assert error.max() < 4e-2


def test_rows_without_a_slot_write_nowhere(network: Network, cache: KVCache) -> None:
    runner = runner_of(network, cache)
    before = cache.kv.clone()
    for rows in (1, 2, 8, 16, 64):
        runner.slots.activate([], rows)
        runner.slots.send()
        runner.program.run(rows, 1280)
    assert torch.equal(cache.kv, before)
    assert runner.slots.given.counters.eq(0).all()


@pytest.mark.parametrize("graphs", [True, False])
def test_sequences_that_join_and_leave_get_the_tokens_that_they_get_alone(
    network: Network, cache: KVCache, graphs: bool
) -> None:
    lengths = [5, 630, 1270, 64, 2550, 33, 100, 1]
    drawn = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=7),
        SamplingParams(temperature=1.1, top_p=0.8, repetition_penalty=1.2, seed=8),
        SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, seed=9),
    ]
    blocks = tables(cache, lengths)
    first = torch.randn(len(lengths), 512, generator=torch.Generator().manual_seed(3)).cuda()

    def sequences() -> list[Sequence]:
        made = []
        for number, length in enumerate(lengths):
            rows = Rows.of([(i * 5 + number) % 512 for i in range(length)])
            sequence = Sequence(rows, Priority.PERSON, drawn[number % 4])
            sequence.seed = number
            sequence.table = BlockTable(list(blocks[number]))
            made.append(sequence)
        return made

    alone: list[list[int]] = []
    runner = runner_of(network, cache, graphs)
    for number, sequence in enumerate(sequences()):
        runner.join(sequence, first[number])
        tokens = [drawn.token_id for _, drawn in runner.read()]
        for _ in range(23):
            runner.launch([sequence])
            tokens += [drawn.token_id for _, drawn in runner.read()]
        runner.leave(sequence)
        alone.append(tokens)

    random, there, away = Random(1), [], sequences()
    order = {id(sequence): number for number, sequence in enumerate(away)}
    found: dict[int, list[int]] = {number: [] for number in range(len(lengths))}
    flights, launched = 0, [0] * len(lengths)

    def read() -> None:
        for sequence, drawn in runner.read():
            found[order[id(sequence)]].append(drawn.token_id)

    while away or there:
        if away and (not there or random.random() < 0.3):
            sequence = away.pop(random.randrange(len(away)))
            runner.join(sequence, first[order[id(sequence)]])
            launched[order[id(sequence)]] = 1
            there.append(sequence)
            flights += 1
        for sequence in [s for s in there if launched[order[id(s)]] >= 24]:
            while flights:
                read()
                flights -= 1
            runner.leave(sequence)
            there.remove(sequence)
        if there:
            runner.launch(there)
            flights += 1
            for sequence in there:
                launched[order[id(sequence)]] += 1
        while flights > 1:
            read()
            flights -= 1
    while flights:
        read()
        flights -= 1
    for number, tokens in enumerate(alone):
        assert found[number][:24] == tokens


def sharing_sequences(cache: KVCache) -> list[Sequence]:
    """Return ten sequences that begin with the same 2,048 rows, and two that do not."""
    lengths = [*(2100 + 7 * i for i in range(10)), 40, 1500]
    made, blocks = [], tables(cache, lengths)
    for number, length in enumerate(lengths):
        common = 2048 // BLOCK if number < 10 else 0
        rows = Rows.of([(i * 5 + number * (i >= 2048)) % 512 for i in range(length)])
        sequence = Sequence(rows, Priority.PERSON, SamplingParams(temperature=0.0))
        sequence.table = BlockTable([*blocks[0][:common], *blocks[number][common:]])
        made.append(sequence)
    return made


def test_rows_that_share_a_prefix_give_what_they_give_without(network: Network, cache: KVCache) -> None:
    runner, sequences = runner_of(network, cache), sharing_sequences(cache)
    kv = runner.program.kv
    assert kv is not None
    sharing = choose_sharing(16, kv.group)
    assert sharing is not None
    blocks = [sequence.table.blocks for sequence in sequences if sequence.table is not None]
    newest = [len(sequence.rows) - 1 for sequence in sequences]
    runner.slots.given.token.copy_(torch.arange(SLOTS) * 7 % 512)
    for slot, row in enumerate(newest):
        runner.slots.put(slot, row, row)
        runner.slots.show(slot, blocks[slot])
    alone = runner.logits(range(12), max(newest)).float()
    shared, members = share(blocks, newest, kv, sharing)
    assert shared == [2048] * 10 + [0] * 2
    runner.slots.share(shared, members)
    runner.slots.send()
    with torch.inference_mode():
        together = runner.program.run(16, context_limit(max(newest)), context_limit(1500))[:12].float()
    error = (together - alone).norm(dim=-1) / alone.norm(dim=-1)
    print(f"sharing: {error.max():.2e}")
    assert error.max() < 4e-2


def test_recorded_steps_of_rows_that_share_are_those_that_are_not_recorded(
    network: Network, cache: KVCache
) -> None:
    found = []
    for graphs in (True, False):
        runner, sequences = runner_of(network, cache, graphs), sharing_sequences(cache)
        for sequence in sequences:
            runner.join(sequence, None)
        tokens: list[list[int]] = []
        for step in range(12):
            if step == 6:
                runner.leave(sequences.pop(0))  # the one whose table was read
            runner.launch(sequences)
            tokens.append([drawn.token_id for _, drawn in runner.read()])
        assert runner.slots.given.shared[: len(sequences)].tolist() == [2048] * 9 + [0] * 2
        found.append(tokens)
    assert found[0] == found[1]
    assert all(token >= 0 for tokens in found[0] for token in tokens)
