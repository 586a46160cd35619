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
    multipliers: tuple[float, float, float, float, float] | None = None
    """Multiply z, x, B, C and dt where they are projected; None: nothing is multiplied."""
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


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"): out(norm(y) * silu(z)).

    Projections make q, k, v and z of each row, and for each value head b and a; q, k and v go through a causal
    convolution and SiLU, q and k are divided by their lengths, and q by the root of `key_dim`. With beta = sigmoid(b)
    and decay = exp(A * softplus(a + dt_bias)), where A < 0, each value head has the state S [key_dim, value_dim],
    zeros before the first row:

        S = decay * S
        S = S + outer(k, beta * (v - k @ S))
        y = q @ S
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    """The number of rows that the convolution sees, the row itself included."""
    norm_eps: float = 1e-6
    """The epsilon of the RMSNorm of each value head."""
    alternating: bool = False
    """Whether value head i reads key head i modulo their number; otherwise neighbours read the same key head."""
    window: ClassVar[None] = None

    @property
    def key_size(self) -> int:
        """The size of all q, and of all k."""
        return self.key_heads * self.key_dim

    @property
    def output_size(self) -> int:
        """The size of all v, y and z."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """The number of channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.output_size

    @property
    def log_size(self) -> int:
        """The size of a log row: q, k and v before the convolution, b and a."""
        return self.conv_size + 2 * self.value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state, fp32."""
        return self.value_heads, self.key_dim, self.value_dim


Recurrence = DeltaNet | Mamba2
"""A mixer whose rows are read one after the other, each by a state that is as large after any number of them."""
