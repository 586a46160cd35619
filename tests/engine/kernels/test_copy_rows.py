"""The copying kernel and what is copied together, against plain indexing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import RowCopy
from engine.kv_cache import KVCache, _independent, copy_rows_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def filled(device: torch.device = DEVICE, kv_heads: int = 3) -> KVCache:
    """8 blocks of 4 rows, 3 layers; 24 elements a row are no power of two."""
    cache = KVCache(3, 8, 4, kv_heads, 8, torch.float32, device)
    cache.kv.copy_(torch.arange(cache.kv.numel(), dtype=torch.float32).view(cache.kv.shape))
    return cache


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_the_kernel_copies_what_indexing_copies(kv_heads: int) -> None:
    pytest.importorskip("triton")
    from engine.kernels.copy_rows import copy_rows

    slots = torch.tensor([[0, 1, 9, 31, 30], [4, 2, 20, 3, 15]], device=DEVICE)
    expected, result = filled(kv_heads=kv_heads).kv, filled(kv_heads=kv_heads).kv
    copy_rows_reference(expected, slots)
    copy_rows(result, slots)
    assert torch.equal(result, expected)
    assert not torch.equal(result, filled(kv_heads=kv_heads).kv)
    copy_rows(result, slots[:, :0].contiguous())
    assert torch.equal(result, expected)


@given(
    st.lists(
        st.builds(RowCopy, st.integers(0, 7), st.integers(0, 7), st.integers(1, 4)).filter(
            lambda copy: copy.source != copy.target
        ),
        max_size=6,
    )
)
def test_copies_made_together_give_what_one_after_the_other_gives(copies: list[RowCopy]) -> None:
    one, together = (filled(torch.device("cpu")) for _ in range(2))
    for copy in copies:
        one.copy_blocks([copy])
    parts = _independent(copies)
    assert [copy for part in parts for copy in part] == copies
    for part in parts:
        before = together.kv.clone()  # all of a part read at once, in whatever order they write
        for copy in reversed(part):
            source, target = copy.source * 4, copy.target * 4
            together.kv[:, :, target : target + copy.rows] = before[:, :, source : source + copy.rows]
    assert torch.equal(one.kv, together.kv)


def test_copies_without_a_conflict_are_one_launch() -> None:
    copies = [RowCopy(0, 4, 4), RowCopy(0, 5, 2), RowCopy(1, 6, 3)]
    assert _independent(copies) == [copies]
    assert _independent([]) == []
