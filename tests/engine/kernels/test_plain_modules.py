"""A packed network that the fused kernels do not compute after all, in Triton's interpreter: what the way out costs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda import packed
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.runner import Runner
from models.loading.load import load_model
from models.network import Network, Weight
from models.reference.decoder import Decoder
from tests.models.checkpoints import files_of, random_model, tiny_llama, write_gguf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
CONFIG = tiny_llama(
    num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, vocab_size=32
)
Q4_K = dict.fromkeys(
    ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), GGUF.Q4_K
)
MATRICES = 4
"""The matrices of a layer: q, k and v together; out; gate and up together; down."""


class Count(TorchDispatchMode):
    """Counts what torch launches on a GPU, and the bytes that the results take; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view and "empty" not in op.name():
            self.launches += 1
            self.bytes += out.nbytes if isinstance(out, torch.Tensor) else 0
        return out


@pytest.fixture
def network(tmp_path: Path) -> Network:
    path = write_gguf(tmp_path / "model.gguf", random_model(CONFIG), Q4_K)
    found = load_model(files_of(path), dtype=torch.float32, device=CPU, packs=lambda spec: True)
    assert found.is_packed
    return found


def a_cache(network: Network) -> KVCache:
    heads = network.spec.attention
    return KVCache.uniform(2, 4, 8, heads.kv_heads, heads.head_dim, torch.float32, CPU)


def a_backend(network: Network) -> SdpaBackend:
    return SdpaBackend(a_cache(network), {})


def test_the_runner_expands_each_weight_once_a_step_with_one_launch(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = StepBatch((Span((0, 1), 0, 1, [3], [0], 1),))
    plain = Decoder(network)
    with torch.inference_mode(), Count() as by_torch:
        hidden = plain.forward(torch.tensor([3]), torch.tensor([0]), a_backend(network).plan(step))
        expected = plain.logits(hidden)[0]
    monkeypatch.setattr(Network, "device", CUDA)  # its memory is on the CPU all the same
    (logits,) = Runner(network, a_backend(network), CPU).run(step)
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()

    expanded: list[int] = []

    def expand(weight: Weight, start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        expanded.append(rows * weight.columns)
        return torch.empty(rows, weight.columns, dtype=dtype)

    monkeypatch.setattr(packed, "_expanded", expand)  # the interpreter calls torch many times for a kernel
    with Count() as by_kernels:
        Runner(network, a_backend(network), CPU).run(step)
    numbers = sum(weight.rows * weight.columns for weight in network.parts(Weight) if weight.planes)
    assert sum(expanded) == numbers
    assert len(expanded) == 2 * MATRICES
    assert by_kernels.launches + len(expanded) < by_torch.launches / 3
    assert by_kernels.bytes < 4 * numbers < by_torch.bytes / 4, "torch writes every weight many times"


def test_the_plain_program_of_decode_steps_does_the_same(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "device", CUDA)
    program: Any = PlainDecoder(network, a_cache(network), None, "triton")  # type: ignore[arg-type]
    assert program._model._quantized is packed.packed_product
