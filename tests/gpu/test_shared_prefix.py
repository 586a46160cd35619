"""Shared prefixes at real sizes, in bf16; tests/engine/kernels/test_shared_prefix.py tests the rules."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def outputs(rows: int, shared: int, heads: tuple[int, int], dim: int) -> list[Tensor]:
    """Return the outputs of the same step, without and with sharing."""
    from benchmarks.shared_prefix import BLOCK, step
    from engine.execute.cuda.decode_attention import AttentionShape
    from models.spec import Attention, Norm, Rope

    shape = AttentionShape(Attention(*heads, dim, head_norm=Norm(), rope=Rope()), BLOCK, PDL)
    found = []
    for together in (False, True):
        work, out = step(shape, rows, shared, 300, alike=True, together=together)
        work()
        found.append(out)
    return found


@pytest.mark.parametrize("shared", [1024, 8192])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(16, (16, 8), 128), (64, (32, 8), 128), (130, (9, 3), 64)]
)
def test_many_sequences_get_what_they_get_alone(
    rows: int, heads: tuple[int, int], dim: int, shared: int
) -> None:
    alone, together = outputs(rows, shared, heads, dim)
    torch.testing.assert_close(together, alone, rtol=2e-2, atol=2e-2)
    assert bool(alone.isfinite().all())
