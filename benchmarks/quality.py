"""The cost in quality of a weight format and of the kernels that run it: next-token distributions over a fixed text,
compared with the same weights in fp32 with fp32 activations.

    python -m benchmarks.quality [MODEL] [--reference MODEL] [--requantize] [--llama-python PYTHON] [--device cpu|cuda]
                                 [--kv-dtype auto,fp8,int8] [--text FILE] [--tokens 1024] [--json FILE]

For every weight format and every executor, it reports the mean KL divergence in nats (with its standard error over the
tokens) and its 99th percentile, how often the likeliest token is the same, the perplexity of the text, and bits per
weight.

Executors: `fp32` is the reference in fp32, so that only the weights differ; `bf16` is the same in bf16. `engine` is
what chatterm really runs when it decodes token by token: native kernels on a CPU with their rounding of activations,
fused kernels on a GPU; with every KV cache of `--kv-dtype`. `llama.cpp` reads the same GGUF file, token by token and
(`prompt`) all at once.

The reference is MODEL itself with its blocks expanded, or the model of `--reference`, whose tokenizer must be the same.
`--requantize` also holds the reference's weights in other formats. The weights of a quantised GGUF file lie on the grid
of its own blocks, so that quantising them again would cost nothing. Therefore the channels of the network are shuffled
first, in a way that does not change its results, so that every block holds numbers of 32 different blocks of the file.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.options import names
from benchmarks.peers.llama_cpp_python import LlamaCppPython, PeerError
from benchmarks.requantized import WAYS, requantized
from benchmarks.stepping import forced_logits
from engine import Engine
from engine.batch import Span, StepBatch
from engine.build import build
from engine.device import pick_dtype
from engine.execute.build_options import BuildOptions
from models.files import ModelFiles
from models.hub.sources import resolve
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.text.tokenizer import load_tokenizer
from models.weights.slots import parameters

CPU = torch.device("cpu")
WINDOW = 512
"""The number of tokens of the text that attend to each other."""
TEXT = Path(__file__).parent / "quality.txt"

Logits = Callable[[list[int]], Tensor]
"""A window of tokens -> the logits after each of them, [T, vocab_size]"""


@dataclass(frozen=True, slots=True)
class Quality:
    """One line of the table."""

    weights: str
    executor: str
    bits: float
    """Bits per weight."""
    kl: float
    kl_error: float
    """Standard error of the mean."""
    kl_99: float
    """99th percentile."""
    same_first: float
    """Share of the tokens after which the likeliest next token is that of the reference."""
    perplexity: float


@dataclass(frozen=True, slots=True)
class Missing:
    """A line of the table that could not be measured."""

    weights: str
    executor: str
    error: str


def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one whole window: [T, heads, head_dim]."""
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def by_modules(network: Network) -> Logits:
    """Return a function that computes logits with the reference decoder, in the dtype of the network."""
    model = Decoder(network)

    def logits(window: list[int]) -> Tensor:
        positions = torch.arange(len(window), device=network.device)
        ids = torch.tensor(window, device=network.device)
        return model.logits(model.forward(ids, positions, attend)).float().cpu()

    return logits


def by_engine(network: Network, kv_dtype: str = "auto") -> tuple[str, Logits]:
    """Return the name of what the engine runs on a CPU when it decodes, and a function that computes its logits."""
    pieces = build(network, CPU, BuildOptions(context=WINDOW, kv_dtype=kv_dtype))
    size = pieces.cache.block_size
    blocks = tuple(range(-(-WINDOW // size)))

    def logits(window: list[int]) -> Tensor:
        found = []
        for row, token in enumerate(window):
            span = Span(blocks[: row // size + 1], row, 1, [token], [row], wanted=True)
            found += [one.float().clone() for one in pieces.runner.run(StepBatch((span,)))]
        return torch.stack(found)

    return pieces.decode_name + told_of(kv_dtype), logits


def told_of(kv_dtype: str) -> str:
    return "" if kv_dtype == "auto" else f", kv {kv_dtype}"


def by_gpu(files: ModelFiles, quantize: str, kv_dtype: str) -> tuple[str, Logits]:
    """Return the same for a GPU; the first token of a window is computed as a prompt."""
    engine = Engine.load(files, device="cuda", quantize=quantize, kv_dtype=kv_dtype, context=WINDOW)

    def logits(window: list[int]) -> Tensor:
        return forced_logits(engine, [window], len(window) - 1)[0].float().cpu()

    return "fused kernels" + told_of(kv_dtype), logits


def by_peer(peer: LlamaCppPython, prompt: bool) -> Logits:
    """Return a function that gets the logits of llama.cpp, for a whole window at once or token by token."""
    return lambda window: torch.frombuffer(peer.logits(window, prompt), dtype=torch.float32).view(
        len(window), -1
    )


def compare(
    windows: list[list[int]],
    reference: list[Tensor],
    logits: Logits,
    weights: str,
    executor: str,
    bits: float,
) -> Quality:
    """Compare the distributions of `logits` with those of the reference, [T, vocab_size] for each window."""
    divergences, same, losses = [], [], []
    for window, p in zip(windows, reference, strict=True):
        with torch.inference_mode():
            q = F.log_softmax(logits(window)[:, : p.shape[1]].double(), dim=-1)
        p = F.log_softmax(p[len(p) - len(q) :].double(), dim=-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
        targets = torch.tensor(window[len(window) - len(q) + 1 :]).unsqueeze(1)
        losses.append(-q[:-1].gather(1, targets))
    kl = torch.cat(divergences)
    return Quality(
        weights,
        executor,
        bits,
        kl.mean().item(),
        kl.std().item() / math.sqrt(len(kl)),
        kl.quantile(0.99).item(),
        torch.cat(same).mean().item(),
        torch.cat(losses).mean().exp().item(),
    )


def bits_of(network: Network) -> float:
    """Return the bits per weight, including norms and biases."""
    return 8 * network.nbytes / parameters(network.spec)


def load(files: ModelFiles, quantize: str, dtype: torch.dtype) -> Network:
    return load_model(files, dtype=dtype, device=CPU, context_length=WINDOW, quantize=quantize)


def measure(
    files: ModelFiles, reference: ModelFiles, arguments: argparse.Namespace
) -> Iterator[Quality | Missing]:
    """Yield the results of every weight format with every executor, beginning with the reference."""
    ids = load_tokenizer(reference).encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    dtype = pick_dtype("auto", CPU)

    exact = load(reference, "none", torch.float32)
    plain = by_modules(exact)
    with torch.inference_mode():
        expected = [plain(window) for window in windows]

    def line(logits: Logits, weights: str, executor: str, bits: float) -> Quality:
        return compare(windows, expected, logits, weights, executor, bits)

    yield line(plain, "reference", "fp32", 16.0)
    if arguments.requantize:
        for way in WAYS:
            for executor, kind in (("fp32", torch.float32), ("engine", dtype)):
                network = requantized(exact, way, kind, WINDOW, shuffle=reference.gguf is not None)
                bits = bits_of(network) if network.is_quantized else 16.0
                name, logits = (executor, by_modules(network)) if executor == "fp32" else by_engine(network)
                yield line(logits, way.name, name, bits)
                del network, logits
    del exact, plain
    yield line(by_modules(load(files, "none", torch.bfloat16)), "expanded", "bf16", 16.0)
    if files != reference:
        yield line(by_modules(load(files, "none", torch.float32)), "expanded", "fp32", 16.0)
    held = load(files, "auto", dtype)
    bits = bits_of(held) if held.is_quantized else 16.0
    for kv_dtype in arguments.kv_dtype:
        name, logits = by_engine(held, kv_dtype)
        yield line(logits, "as stored", name, bits)
    del held, logits
    for kv_dtype in arguments.kv_dtype if arguments.device == "cuda" else ():
        name, logits = by_gpu(files, "auto", kv_dtype)
        yield line(logits, "as stored", name, bits)
    if arguments.llama_python is not None and files.gguf is not None:
        for prompt in (False, True):
            executor = f"llama.cpp{', prompt' * prompt}"
            try:
                with LlamaCppPython(arguments.llama_python, files.gguf, 2, WINDOW, logits=True) as peer:
                    found = line(by_peer(peer, prompt), "as stored", executor, bits)
            except PeerError as error:
                yield Missing("as stored", executor, str(error))
            else:
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--reference", help="the model that is true; default: MODEL, expanded")
    parser.add_argument("--requantize", action="store_true", help="the reference in other formats, too")
    parser.add_argument("--llama-python", help="a Python that has llama_cpp, for GGUF files")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU, too")
    parser.add_argument("--kv-dtype", type=names, default=["auto"], help="of our KV cache")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="how much of the text")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    files = resolve(arguments.model)
    reference = files if arguments.reference is None else resolve(arguments.reference)
    print(
        f"{'weights':22}{'computed by':44}{'bits':>6}{'KL, nats':>20}{'99%':>9}{'same first':>12}{'perplexity':>12}"
    )
    lines = []
    for line in measure(files, reference, arguments):
        lines.append(asdict(line))
        if isinstance(line, Missing):
            print(f"{line.weights:22}{line.executor:44}{line.error}", flush=True)
            continue
        kl = f"{line.kl:.5f} ± {line.kl_error:.5f}"
        print(
            f"{line.weights:22}{line.executor:44}{line.bits:6.2f}{kl:>20}{line.kl_99:9.4f}{line.same_first:12.1%}"
            f"{line.perplexity:12.3f}",
            flush=True,
        )
    if arguments.json is not None:
        told = {"machine": describe(torch.device(arguments.device)), "model": files.name, "lines": lines}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
