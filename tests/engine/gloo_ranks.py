"""A rank of a test that computes with the others over gloo. It imports little: there are eight of them."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.execute.group import Group
from models.files import ModelFiles
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder

CPU = torch.device("cpu")
TOKENS = torch.tensor([3, 141, 59, 26, 5, 35, 89, 79, 3, 23, 84, 62])
_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
"""What rounding once may differ by if the ranks are summed in another order."""
Case = tuple[ModelFiles, str]
"""A model, and how its weights are held."""


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of a whole text."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def logits_of(network: Network, group: Group | None) -> Tensor:
    with torch.inference_mode():
        model = Decoder(network, peers=group)
        return model.logits(model.forward(TOKENS, torch.arange(len(TOKENS)), attend))


def each_logits(rank: int, ranks: int, meeting: str, cases: list[Case]) -> list[Tensor]:
    """[tokens, vocab] of each model, as this rank has them."""
    torch.set_num_threads(1)
    group = Group.join(Path(meeting), rank, ranks, CPU) if ranks > 1 else None
    if group is not None:
        assert group.least(10 - rank) == 11 - ranks
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            parts = [torch.randn(7, 33, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
            total = torch.stack([part.to(dtype).float() for part in parts]).sum(0).to(dtype)
            torch.testing.assert_close(group.sum(parts[rank].to(dtype)), total, rtol=_STEP[dtype], atol=1e-6)
    return [
        logits_of(
            load_model(files, dtype=torch.float32, device=CPU, quantize=quantize, rank=(rank, ranks)), group
        )
        for files, quantize in cases
    ]
