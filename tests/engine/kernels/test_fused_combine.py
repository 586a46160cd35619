"""Output projections that combine the parts of the attention themselves, in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF

pytest.importorskip("triton")

from engine.execute.cuda import step_attention
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import KernelConfigs, numbers
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.tiles import LANES
from models.loading.load import load_model
from models.network import Network
from tests.engine.kernels.test_rows import Case
from tests.models.checkpoints import (
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"),
    pytest.mark.usefixtures("few_programs"),
]


@pytest.fixture(scope="module", params=["qwen3", "llama", "Q5_K", "Q6_K"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder, name = tmp_path_factory.mktemp("attended"), request.param
    sizes: dict[str, Any] = {"num_hidden_layers": 2 if name == "qwen3" else 1, "vocab_size": 24}
    if name == "llama":
        config = tiny_llama(hidden_size=384, num_attention_heads=3, num_key_value_heads=3, **sizes)
    else:
        config = tiny_qwen3(hidden_size=256, num_attention_heads=4, head_dim=128, **sizes)
    if name in GGUF.__members__:
        files = files_of(write_gguf(folder / "model.gguf", random_model(config), {"attn_output": GGUF[name]}))
        return load_model(files, dtype=torch.float32, device=CPU, packs=lambda spec: True)
    return load_model(files_of(write_checkpoint(folder, config)), dtype=torch.float32, device=CPU)


def laned_cuts(decoder: FusedDecoder) -> KernelConfigs:
    """Quantised output projections have lanes: only those combine."""
    return KernelConfigs(
        chosen={
            name: numbers(cut)
            for name, cuts in decoder.cuts.candidates.items()
            for cut in cuts
            if getattr(cut, "lanes", 1) == LANES
        }
    )


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every launch that combined the parts of the attention before a product."""
    rows: list[int] = []
    attend: Callable[..., None] = step_attention.attend

    def counted(shape: Any, given: Any, out: Any, count: int, *others: Any) -> None:
        if out is not None:
            rows.append(count)
        attend(shape, given, out, count, *others)

    monkeypatch.setattr(step_attention, "attend", counted)
    return rows


def test_rows_have_the_same_bits_whoever_combines_their_parts(model: Network, combined: list[int]) -> None:
    case = Case(model, [3, 200, 250, 64])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False)
    case.run(decoder, [0], 1)
    decoder.cuts = laned_cuts(decoder)
    combined.clear()
    alone = torch.cat([case.run(decoder, [slot], 1)[0] for slot in range(4)])
    assert not combined
    pair, _ = case.run(decoder, [2, 0], 2)
    one, _ = case.run(decoder, [1], 2)  # and a row without a sequence
    four, cache = case.run(decoder, [0, 1, 2, 3], 4)
    assert torch.equal(pair, alone[[2, 0]])
    assert torch.equal(one, alone[1:2])
    assert torch.equal(four, alone)
    case.slots.activate([2], 1)
    case.slots.send()
    case.cache.kv.copy_(case.before)
    with torch.inference_mode():
        long = decoder.run(1, 2560)  # in a step for longer sequences there are too many parts
    assert torch.equal(long[:1], alone[2:3])
    assert combined == [rows for rows in (2, 2, 4, 1) for _ in model.layers]
    plain, written = case.run(PlainDecoder(model, case.cache, case.slots.given, "triton"), [0, 1, 2, 3], 4)
    torch.testing.assert_close(alone, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)
