"""Mixers that keep a state of fixed size instead of rows: data that families write and executors read."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A selective state space (Dao and Gu 2024, "Transformers are SSMs"): out(gated norm(y)).

    One projection makes z, x, B, C and dt of each row; x, B and C go through a causal convolution and SiLU. With
    a = -exp(A_log) and t = softplus(dt + dt_bias) within `step_limits`, each head has the state S [head_dim,
    state_size], zeros before the first row:

        S = exp(t * a) * S + t * outer(x, B)
        y = S @ C + D * x

    The gated norm is norm(y * silu(z)), or norm(y) * silu(z).
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    """The heads are divided into this many groups of neighbours, each with one B, one C and one norm."""
    conv_width: int = 4
    """The number of rows that the convolution sees, the row itself included."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, inf)
    """The least and the greatest t."""
    norm_eps: float | None = 1e-5
    """The epsilon of the RMSNorm; None: y * silu(z) is not normed."""
    norms_first: bool = False
    """Whether y is normed before it is multiplied by silu(z)."""
    window: ClassVar[None] = None

    @property
    def output_size(self) -> int:
        """The size of x, y and z: all heads."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """The number of channels of the convolution: x, B and C."""
        return self.output_size + 2 * self.groups * self.state_size

    @property
    def log_size(self) -> int:
        """The size of a log row: x, B and C before the convolution, and dt."""
        return self.conv_size + self.heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state, fp32."""
        return self.heads, self.head_dim, self.state_size
