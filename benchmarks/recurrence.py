"""The recurrence of one gated delta net over a prompt, in each form that can compute it, with random weights.

    python -m benchmarks.recurrence [--shape 0.8B,9B] [--rows 512,4096,16384] [--device cpu|cuda] [--threads 2]
                                    [--rounds 3] [--forms torch,kernel,chunked]

All begin with the convolution and end before the gated norm. `torch` is what the reference computes row by row in fp32
(`models.reference.delta_net.walk`), `chunked` multiplies matrices of 64 rows in fp32. `kernel` is what kernels compute
row by row (`engine.kernels.triton.recurrence`); it is timed with rows in bf16. Each line has the median of several
rounds, the time of all such layers of the model for one prompt, and how far the form is from the chunked one in fp64:
the largest error of an output and of the state at the end, by the largest number there.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe
from engine.batch import NONE
from engine.kernels.walks import Walks
from models.network import DeltaNetWeights, Linear, NormWeights, Weight
from models.recurrences import DeltaNet
from models.reference.delta_net import walk

CHUNK = 64
SHAPES = {
    "tiny": (DeltaNet(2, 4, 16, 16), 2),
    "0.8B": (DeltaNet(16, 16, 128, 128), 18),
    "9B": (DeltaNet(16, 32, 128, 128), 24),
    "27B": (DeltaNet(16, 48, 128, 128), 48),
    "35B": (DeltaNet(16, 32, 128, 128), 30),
}
"""The delta nets of Qwen3.5 by the size of the model, and how many layers have one."""

Form = Callable[[DeltaNet, DeltaNetWeights, Tensor, Tensor], tuple[Tensor, Tensor]]
"""As `models.reference.delta_net.walk`."""


def random_weights(spec: DeltaNet, device: torch.device) -> DeltaNetWeights:
    """Draw what a recurrence needs in fp32: states forget half of what they hold in 1 to 100 rows or so."""
    empty = Linear((Weight.plain(torch.empty(0, 0)),))
    return DeltaNetWeights(
        inputs=empty,
        gates=empty,
        filters=torch.randn(spec.conv_size, spec.conv_width, device=device) / 2,
        dt_bias=torch.randn(spec.value_heads, device=device) - 4,
        decay=-torch.rand(spec.value_heads, device=device) * 16,
        norm=NormWeights(torch.ones(spec.value_dim, device=device)),
        out=empty,
    )


def in_chunks(
    spec: DeltaNet, weights: DeltaNetWeights, rows: Tensor, state: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute what `walk` does, in `dtype`, for whole chunks of rows.

    With the decays D of the rows of a chunk since its start, and u the changes that rows make of the state S before it:
    u[i] = beta[i] * (v[i] - D[i] * k[i] @ S - the sum of D[i] / D[j] * (k[i] @ k[j]) * u[j] over j < i), a triangular
    system (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length").
    """
    q, k, v, log_decay, beta = (
        part.unflatten(1, (-1, CHUNK)) for part in _parts(spec, weights, rows.to(dtype), dtype)
    )
    total = log_decay.cumsum(-1)
    lasting = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    system = torch.tril(beta.unsqueeze(-1) * (k @ k.mT) * lasting, -1)
    given = torch.cat((beta.unsqueeze(-1) * v, (beta * total.exp()).unsqueeze(-1) * k), -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    values, keys = solved.split([spec.value_dim, spec.key_dim], -1)
    within = (q @ k.mT) * lasting
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept = total[..., -1].exp()[..., None, None]
    state, outs = state.to(dtype), []
    for chunk in range(q.shape[1]):
        changes = values[:, chunk] - keys[:, chunk] @ state
        outs.append(q[:, chunk] @ state + within[:, chunk] @ changes)
        state = kept[:, chunk] * state + k[:, chunk].mT @ changes
    return torch.cat(outs, 1).transpose(0, 1).flatten(1), state


def _parts(
    spec: DeltaNet, weights: DeltaNetWeights, rows: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v [value heads, rows, size], and the logarithms of decays and the betas [value heads, rows]."""
    channels, gates = rows.split([spec.conv_size, 2 * spec.value_heads], -1)
    filters = weights.filters.to(dtype).unsqueeze(1)
    inputs = F.silu(F.conv1d(channels.T.unsqueeze(0), filters, groups=spec.conv_size)[0])
    q, k, v = inputs.split([spec.key_size, spec.key_size, spec.output_size])
    q, k = (part.view(spec.key_heads, spec.key_dim, -1).mT for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(spec.value_heads // spec.key_heads, 0) for part in (q, k))
    b, a = gates[spec.conv_width - 1 :].T.chunk(2)
    log_decay = weights.decay.to(dtype)[:, None] * F.softplus(a + weights.dt_bias.to(dtype)[:, None])
    v = v.view(spec.value_heads, spec.value_dim, -1).mT
    return q * spec.key_dim**-0.5, k, v, log_decay, b.sigmoid()


def by_kernel(spec: DeltaNet, weights: DeltaNetWeights, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `walk` does for the rows of one prompt from its first on, with `state` being zeros."""
    from engine.kernels.triton.recurrence import walk_rows

    tail, end = spec.conv_width - 1, torch.empty_like(state)
    own, count = rows[tail:], len(rows) - tail
    line = torch.cat((torch.full((tail,), NONE), NONE - 1 - torch.arange(count)))
    places, slots, spans, saves = (
        each.to(rows.device, torch.int32)
        for each in (
            line.unfold(0, tail + 1, 1).contiguous(),
            torch.arange(count),
            torch.tensor([[0, 0, count, 0, NONE, 0, 1, 0]]),
            torch.tensor([[count, 0]]),
        )
    )
    walks = Walks(places, slots, spans, saves)
    parts = own[:, : spec.conv_size], own[:, spec.conv_size :]
    return walk_rows(spec, weights, walks, parts, torch.empty_like(own), end.unsqueeze(0)), end


FORMS: dict[str, Form] = {
    "torch": walk,
    "kernel": by_kernel,
    "chunked": in_chunks,
}


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time of `run`, after one run that is not counted."""
    found = []
    for number in range(rounds + 1):
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            found.append(perf_counter() - start)
    return median(found)


def kernel_times(run: Callable[[], object]) -> str:
    """Return the milliseconds of each of our kernels that `run` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [
        f"{event.key.removesuffix('_kernel')} {event.device_time_total / 1e3:.2f}"
        for event in profile.key_averages()
        if event.key.endswith("_kernel")
    ]
    return "  " + ", ".join(found)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, by the largest number that is expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@torch.inference_mode()
def measure(name: str, rows: int, forms: list[str], device: torch.device, rounds: int) -> Iterator[str]:
    """Yield a line with the time and the error of each form for a prompt of `rows` rows."""
    spec, layers = SHAPES[name]
    torch.manual_seed(0)
    weights = random_weights(spec, device)
    text = torch.randn(spec.conv_width - 1 + rows, spec.log_size, device=device)
    text[: spec.conv_width - 1] = 0
    zeros = torch.zeros(spec.state_shape, device=device)
    truth, end = in_chunks(spec, weights, text, zeros, torch.float64)
    for form in forms:
        out, last = FORMS[form](spec, weights, text, zeros)
        far = max(error(out, truth), error(last, end))
        rows_given = text.bfloat16() if form == "kernel" else text
        run = partial(FORMS[form], spec, weights, rows_given, zeros)
        taken = seconds(run, device, rounds)
        line = f"{name:>6} {rows:>6} {form:>8} {taken * 1e3:>10.2f} {taken * layers:>9.3f} {far:9.1e}"
        yield line + (kernel_times(run) if form == "kernel" else "")


def main() -> None:
    """Parse the command line and print one line for each shape and length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.8B,9B")
    parser.add_argument("--rows", default="512,4096,16384")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default=",".join(FORMS))
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    lengths, names = [int(count) for count in given.rows.split(",")], given.shape.split(",")
    if any(count < CHUNK or count % CHUNK for count in lengths):
        parser.error(f"--rows must be multiples of {CHUNK}")
    if unknown := sorted(set(names) - set(SHAPES)):
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    forms = given.forms.split(",")
    if unknown := sorted(set(forms) - set(FORMS)):
        parser.error(f"no form {', '.join(unknown)}; there are {', '.join(FORMS)}")
    device = torch.device(given.device)
    if device.type != "cuda":
        forms = [form for form in forms if form != "kernel"]
    print(describe(device))
    print(" shape   rows     form   layer ms  layers s     error")
    for name in names:
        for count in lengths:
            for line in measure(name, count, forms, device, given.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
