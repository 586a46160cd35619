"""The copying kernel against plain indexing."""

import pytest
import torch

from engine.cache.kv_cache import KVCache, copy_rows_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def filled(device: torch.device = DEVICE, kv_heads: int = 3) -> KVCache:
    """8 blocks of 4 rows, 3 layers; 24 elements a row are no power of two."""
    cache = KVCache.uniform(3, 8, 4, kv_heads, 8, torch.float32, device)
    cache.kv.copy_(torch.arange(cache.kv.numel(), dtype=torch.float32).view(cache.kv.shape))
    return cache


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_the_kernel_copies_what_indexing_copies(kv_heads: int) -> None:
    pytest.importorskip("triton")
    from engine.kernels.triton.copy_rows import copy_rows

    slots = torch.tensor([[0, 1, 9, 31, 30], [4, 2, 20, 3, 15]], device=DEVICE)
    expected, result = filled(kv_heads=kv_heads).kv, filled(kv_heads=kv_heads).kv
    copy_rows_reference(expected, slots)
    copy_rows(result, slots)
    assert torch.equal(result, expected)
    assert not torch.equal(result, filled(kv_heads=kv_heads).kv)
    copy_rows(result, slots[:, :0].contiguous())
    assert torch.equal(result, expected)
