"""Every row of random texts by native kernels: against the reference executor, and in any company."""

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from engine.execute.compatibility import not_native
from engine.kernels.native.library import NativeLibrary, Pool
from models.network import Network
from models.reference.decoder import Decoder
from tests.engine.native import test_native_batches as batches
from tests.engine.native.test_native_chunks import relative
from tests.engine.native.test_native_decode import rounded
from tests.engine.native.test_native_families import logits_of
from tests.models.checkpoints import PlainAttention

Company = Callable[[Network, list[batches.Sequence], Pool, int, torch.dtype, Random], Tensor]
"""Compares the bits of every row in any company with those it has alone, and returns its logits, [rows, vocab]."""


def all_logits(decoder: Decoder, texts: list[batches.Sequence]) -> Tensor:
    """Return the logits after every row of the texts, [rows, vocab]."""
    return torch.cat([logits_of(decoder, text, PlainAttention(decoder.network)) for text in texts])


def check(
    model: Network,
    library: NativeLibrary,
    pool: Pool,
    lengths: Sequence[int],
    dtype: torch.dtype,
    same_in_company: Company = batches.same_in_company,
    slack: float = 1e-5,
) -> None:
    """Compare every row with the reference, and its bits in any company with those it has alone.

    With a cache in 16 bits, other experts may be chosen for some rows, so that only bits are compared.
    """
    assert not_native(model.spec) is None
    random = Random(len(lengths))
    texts = batches.random_texts(model, lengths, random)
    expected = all_logits(Decoder(model), texts)
    near = all_logits(rounded(model), texts) if model.is_quantized else expected
    limit = 2 * relative(near, expected) + slack
    for variant in library.variants.values():
        found = same_in_company(model, texts, pool, variant, dtype, random)
        if dtype == torch.float32:
            assert relative(found, expected) < limit
