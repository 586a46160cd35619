"""The gated delta rule for one row of one value head, whose state lies in registers.

The plain twin is `walk` in `models/reference/delta_net.py`. A warp has all keys of its own values, so sums over keys
need no other warp, and their order depends neither on how many values a program has nor on how many rows it reads.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.gluon import constexpr_function, gl, jit


def warp_values(keys: int) -> int:
    """Return how many columns of a state with so many keys a warp has, so that they fit in its registers."""
    return 16 if keys <= 128 else 8


@constexpr_function
def state_layout(keys, warps, by_key=True):
    """Return the layout of a state [keys, `warp_values` * warps]: eight threads of a warp divide the keys, four the
    values.

    In memory the values of a key lie side by side or, unless `by_key`, the keys of a value.
    """
    values = 4 if keys <= 128 else 2
    return gl.BlockedLayout([min(keys // 8, 4), values], [8, 4], [1, warps], [1, 0] if by_key else [0, 1])


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) in fp32 with a small relative error, however small the result.

    With u = exp(-|x|), log(1 + u) is the series of 2 artanh(s) with s = u / (2 + u), which is at most 1/3.
    """
    size = tl.where(x < 0.0, -x, x)
    u = tl.exp(-size)
    s = u / (2.0 + u)
    square = s * s
    total = square * (1.0 / 15.0) + 1.0 / 13.0
    for i in tl.static_range(6):
        total = total * square + 1.0 / (11.0 - 2.0 * i)
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * total


@triton.jit
def forget(a, dt_bias, decay):
    """Return the factor by which a state decays: exp(decay * softplus(a + dt_bias)), all fp32."""
    return tl.exp(decay * softplus(a + dt_bias))


@triton.jit
def sigmoid(x, dtype: tl.constexpr):
    """Return the sigmoid of x, rounded to `dtype`, as fp32."""
    return (1.0 / (1.0 + tl.exp(-x.to(tl.float32)))).to(dtype).to(tl.float32)


@jit
def convolved(earlier, new, filters, dtype: tl.constexpr, bias=None):
    """Convolve channels: the inputs of the rows before one, its own, and the filters of all these -> fp32.

    The sum with the bias, unless that is None, is rounded to `dtype`, and so is its SiLU.
    """
    total = filters[0].to(tl.float32) * 0.0
    if bias is not None:
        total += bias.to(tl.float32)
    for tap in tl.static_range(len(earlier)):
        total += filters[tap].to(tl.float32) * earlier[tap].to(tl.float32)
    total += filters[len(earlier)].to(tl.float32) * new.to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + gl.exp(-total))).to(dtype).to(tl.float32)


@jit
def unit_length(x):
    """Divide x, fp32 [keys], by its length, as the reference does."""
    return x * gl.rsqrt(gl.sum(x * x, 0) + 1e-6)


@jit
def advance(state, k, v, beta, factor):
    """Return the state fp32 [keys, values] after a row with k [keys] and v [values]; `factor` is that of `forget`."""
    state = state * factor
    k = gl.expand_dims(k, 1)
    change = (v - gl.sum(state * k, 0)) * beta
    return state + k * gl.expand_dims(change, 0)


@jit
def read_out(state, q):
    """Return q @ state: fp32 [keys, values], [keys] -> [values]."""
    return gl.sum(state * gl.expand_dims(q, 1), 0)
