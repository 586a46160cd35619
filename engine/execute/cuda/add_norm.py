"""The operations between two products of a layer: the sum with the residual, and the norms before and after it."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from engine.kernels.triton.prefill import norm_kernel
from models.network import Linear, NormWeights
from models.spec import Norm
from models.weights.formats.blocks import BLOCKS

Normed = tuple[Norm, NormWeights]


def normed(norm: Norm | None, weights: NormWeights | None) -> Normed | None:
    """Pair a norm with its weights; None if there is no norm."""
    return None if norm is None or weights is None else (norm, weights)


@dataclass(frozen=True, slots=True)
class AddNorm:
    """total = (residual + `scale` * `post` of x) * `factor`, and `norm` of total. What is None changes nothing."""

    post: Normed | None
    scale: float
    norm: Normed | None
    factor: Tensor | None = None
    """[1]"""

    def arguments(self) -> dict[str, Any]:
        """Return the named arguments of `norm_kernel`, and of `sum_norm_kernel`."""
        found: dict[str, Any] = {
            "EPS": 0.0 if self.norm is None else self.norm[0].eps,
            "NORM": self.norm is not None,
            "OFFSET": 0.0 if self.norm is None else self.norm[0].offset,
            "ONCE": self.norm is not None and self.norm[0].rounds_last,
            "SCALE": self.scale,
        }
        if self.post is not None:
            kind, weights = self.post
            found |= {"post_weight": weights.weight, "POST_EPS": kind.eps}
            found |= {"POST_OFFSET": kind.offset, "POST_ONCE": kind.rounds_last}
        if self.factor is not None:
            found["factor"] = self.factor
        return found

    def after_prepared(self) -> dict[str, Any]:
        """Return the named arguments of `add_prepared_kernel` for total."""
        assert self.post is not None
        return {"EPS": self.post[0].eps, "SCALE": self.scale, "factor": self.factor}


def add_norm(
    x: Tensor, residual: Tensor | None, between: AddNorm, out: Tensor, total: Tensor, pdl: bool = False
) -> Any:
    """Write total [T, size] and out, its norm; without a `residual`, total is x. Return the launched kernel.

    x is [T, size], or a result of `Products.parts`. `out` determines T.
    """
    rows, size = out.shape
    block = triton.next_power_of_2(size)
    return norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        x if between.norm is None else between.norm[1].weight,
        out,
        total,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        PARTS=x.shape[0] if x.dim() == 3 else 0,
        PDL=pdl,
        **between.arguments(),
        num_warps=max(1, min(8, block // 512)),
        launch_pdl=pdl,
    )


def wants_norm(layer: Linear) -> bool:
    """Return whether a product is faster if the one before it prepares x for its norm.

    Kernels with quantised weights wait for instructions, and the norm takes many. On an H200, steps of one and of eight
    tokens take 0.98 and 0.94 of their time for 8B in Q4_0, 0.98 and 0.95 in Q4_K_M, 0.92 and 0.91 for 0.6B in Q4_0. But
    in Q8_0 8B takes 1.01 and 1.00, and in bf16 0.6B takes 1.12 and 0.99, because the sums of squares arrive later.
    """
    return all(part.planes is not None and BLOCKS[part.format].planes[0] < 8 for part in layer.parts)
