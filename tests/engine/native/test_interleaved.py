"""Weights whose rows are interleaved: to the bit what they give as they lie in a file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.execute.cpu import interleaving
from engine.execute.cpu.executor import NativeDecoder
from engine.execute.cpu.interleaving import Interleaving
from engine.kernels.native.library import INTERLEAVED, Matrix, NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import Linear, Network
from tests.covering import each_value_once
from tests.engine.native.test_native_chunks import COUNT, Prompt, run
from tests.engine.native.test_native_decode import CONFIGS, CPU, cache_for
from tests.engine.native.test_native_experts import CONFIGS as EXPERT_CONFIGS
from tests.engine.native.test_native_experts import EXPERTS, GGUF
from tests.engine.native.test_products import KINDS, SMALL, Weight, multiply_many, random_weight
from tests.models.checkpoints import files_of, random_model, write_gguf
from tests.models.families import DEEPSEEK_GGUF, tiny_deepseek

LLAMA = {**CONFIGS["llama"].to_dict(), "attention_bias": False, "mlp_bias": False}
LATENT = {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "q_lora_rank": 32, "hidden_size": 192}
ALL = CONFIGS | EXPERT_CONFIGS | {"llama": type(CONFIGS["llama"])(**LLAMA)}
ALL["deepseek"] = tiny_deepseek(**LATENT, moe_intermediate_size=64)
ATTENTION = {"attn_q": Kind.Q4_0, "attn_k": Kind.Q8_0, "attn_v": Kind.Q4_1, "attn_output": Kind.Q4_0}
FEEDS: dict[str, Mapping[str, Kind]] = {
    "qwen3": {"ffn_gate": Kind.Q4_0, "ffn_up": Kind.Q4_1, "ffn_down": Kind.Q8_0, "token_embd": Kind.Q8_0},
    "llama": {"ffn_gate": Kind.Q6_K, "ffn_up": Kind.Q8_0, "ffn_down": Kind.Q4_0, "token_embd": Kind.Q4_1},
    "deepseek": dict.fromkeys(("attn_q_a", "attn_kv_a_mqa", "attn_v_b"), Kind.Q8_0)
    | dict.fromkeys(("attn_q_b", "attn_k_b", "ffn_gate", "ffn_up", "ffn_down", "token_embd"), Kind.Q4_0),
    "qwen3 moe": dict(zip(EXPERTS, (Kind.Q4_0, Kind.Q8_0, Kind.Q4_1), strict=True)),
    "ernie moe": dict(zip(EXPERTS, (Kind.Q8_0, Kind.Q4_0, Kind.Q4_0), strict=True)),
    "gpt-oss": dict.fromkeys(EXPERTS, Kind.MXFP4),
}


@pytest.fixture(params=["avx2", "avxvnni", "avx512", "avx512bf16", "dotprod", "i8mm"])
def variant(request: pytest.FixtureRequest, library: NativeLibrary) -> int:
    if request.param not in library.variants:
        pytest.skip(f"this machine does not run {request.param}")
    return library.variants[request.param]


def interleaved(library: NativeLibrary, weight: Weight) -> Weight | None:
    """The same weight, at an address that no vector likes; None where the library does not interleave it."""
    put = np.zeros(1 + weight.data.nbytes, dtype=np.uint8)[1:].reshape(weight.data.shape)
    if not library.functions.ct_interleave(weight.matrix, put.ctypes.data):
        return None
    given = weight.matrix
    matrix = Matrix(put.ctypes.data, given.row_bytes, given.type, given.rows, given.columns, INTERLEAVED)
    return replace(weight, data=put, matrix=matrix)


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (4096, 64)])
def test_products_have_the_bits_of_rows_that_lie_one_after_the_other(
    library: NativeLibrary, pool: Pool, variant: int, kind: Kind, rows: int, columns: int
) -> None:
    weight = random_weight(kind, rows, columns)
    changed = interleaved(library, weight)
    assert changed is not None
    assert not np.array_equal(changed.data, weight.data)
    x = np.random.default_rng(rows).standard_normal((21, columns)).astype(np.float32)
    for count in (1, 2, 3, 5, 8, 9, 21):  # the last two are multiplied with panels
        plain, found = (multiply_many(pool, variant, each, x[:count]) for each in (weight, changed))
        np.testing.assert_array_equal(found, plain)


def test_what_cannot_be_interleaved_stays(library: NativeLibrary, pool: Pool) -> None:
    for kind in KINDS:
        found = interleaved(library, random_weight(kind, 32, 256))
        assert (found is not None) == (kind in SMALL)
    assert interleaved(library, random_weight(Kind.Q8_0, 24, 64)) is None  # half a panel is left
    changed = interleaved(library, random_weight(Kind.Q8_0, 32, 64))
    assert changed is not None
    assert interleaved(library, changed) is None
    x, out = np.zeros(64, np.float32), np.zeros(32, np.float32)
    with pool.held() as handle:  # the portable kernels do not read it
        assert not library.functions.ct_products(
            handle, library.variants["portable"], changed.matrix, 1, x.ctypes.data, out.ctypes.data
        )


def mapped_network(name: str, folder: Path) -> Network:
    """A network whose blocks lie in a file, of a different kind for every matrix."""
    metadata = DEEPSEEK_GGUF if name == "deepseek" else GGUF.get(name, {})
    path = write_gguf(folder / "m.gguf", random_model(ALL[name]), ATTENTION | FEEDS[name], metadata=metadata)
    model = load_model(files_of(path), dtype=torch.float32, device=CPU)
    assert model.is_quantized
    return model


@each_value_once
@pytest.mark.parametrize("name", FEEDS)
def test_a_network_has_the_same_bits_before_meanwhile_and_afterwards(
    name: str, tmp_path: Path, pool: Pool, variant: int
) -> None:
    model = mapped_network(name, tmp_path)
    prompt = Prompt(model)
    expected, expected_kv = run(model, prompt, pool, variant, torch.bfloat16, [COUNT])
    cache = cache_for(model, torch.bfloat16)
    decoder = NativeDecoder(model, cache, pool, variant)
    left = [decoder.interleave(0)]
    mapped = sum(w.nbytes for part in model.parts(Linear) for w in part.parts if w.is_mapped)
    assert 0 < left[0] <= mapped
    for size in (1, left[0] // 3, left[0] // 3, left[0]):
        left.append(decoder.interleave(size))
        for ends in ([COUNT], [1, 2, 11, COUNT - 1, COUNT]):
            assert torch.equal(prompt.run(decoder, ends), expected)
            assert torch.equal(cache.kv[:, :, prompt.slots].flatten(), expected_kv)
    assert left[-1] == 0
    assert left == sorted(left, reverse=True)
    assert decoder.interleave(1 << 20) == 0


def test_portable_kernels_leave_everything_where_it_is(
    tmp_path: Path, library: NativeLibrary, pool: Pool
) -> None:
    model = mapped_network("qwen3", tmp_path)
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool, library.variants["portable"])
    assert decoder.interleave(0) == 0


def resident(path: Path) -> int:
    """Bytes of a mapped file that count as memory of this process."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            here = bool(rest) and rest[-1] == str(path)
        elif here and first == "Rss:":
            found += int(rest[0]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident")
def test_the_pages_of_the_file_are_given_back(tmp_path: Path, pool: Pool) -> None:
    config = type(CONFIGS["qwen3"])(**CONFIGS["qwen3"].to_dict() | {"vocab_size": 8192})
    path = write_gguf(tmp_path / "large.gguf", random_model(config), Kind.Q8_0)
    model = load_model(files_of(path), dtype=torch.float32, device=CPU)
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    if (total := decoder.interleave(0)) == 0:
        pytest.skip("this machine has no kernels for it")
    assert total > 2_000_000
    assert resident(path) > total
    decoder.interleave(total)
    assert resident(path) < total // 4  # a page of every weight, and what was not quantised


def test_copies_are_made_only_where_memory_has_room_for_them_and_the_file(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mapped_network("qwen3 moe", tmp_path)
    free = 0

    def fresh(kv_bytes: int = 1000) -> tuple[Interleaving, int]:
        decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
        return Interleaving(decoder, kv_bytes), decoder.interleave(0)

    monkeypatch.setattr(interleaving, "available_memory", lambda _: free)
    monkeypatch.setattr(interleaving, "SLICE", 1)
    copies, total = fresh()
    if not total:
        pytest.skip("this machine has no kernels for it")
    free = 2 * total + 999
    assert not copies.go_on()
    free = 1 << 40
    assert not copies.go_on()  # it does not come back to it
    assert copies.copied == 0

    copies, total = fresh()
    free = 2 * total + 1000
    assert copies.go_on()
    first = copies.copied
    assert 0 < first < total
    free -= first  # what it takes itself leaves enough for what is left
    while copies.go_on():
        pass
    assert copies.copied == total


def test_where_memory_runs_out_the_rest_stays_in_the_file(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mapped_network("qwen3 moe", tmp_path)
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    copies = Interleaving(decoder, 0)

    def refuse(nbytes: int) -> int:
        raise NativeError("memory is short")

    monkeypatch.setattr(decoder, "interleave", refuse)
    assert not copies.go_on()
    assert copies.copied == 0
