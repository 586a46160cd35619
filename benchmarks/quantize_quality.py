"""What quantised weights cost: the next-token distribution against that of bf16 weights, over a fixed text.

    python -m benchmarks.quantize_quality [MODEL] [--text FILE] [--tokens 1024] [--json FILE]

For every way of holding the weights: the mean KL divergence in nats (and its standard error over the tokens), how
often the likeliest token is the same, the perplexity of the text, and bytes a weight. Activations are fp32, so that
only the weights differ, but for the line that says how much bf16 activations alone change.

The weights of a quantised GGUF file lie on the grid of its own blocks, and quantising them again would cost nothing.
So they are expanded, and the channels of the network are shuffled, in a way that leaves what it computes as it is:
every block then holds numbers of 32 different blocks of the file.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import shared_tensors
from models.families.family import NAMES
from models.hub.sources import resolve
from models.load import fill_network, load_model, match
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import FeedForward, ModelSpec
from models.text.tokenizer import load_tokenizer
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor
from models.weights.quantize import choose_kinds
from models.weights.slots import Slot

CPU = torch.device("cpu")
WINDOW = 512
"""Tokens of the text that see each other."""
TEXT = Path(__file__).parent / "quantize_quality.txt"
HEAD = ("model.embed_tokens.weight", "lm_head.weight")


Kinds = Callable[[list[StoredTensor], Mapping[str, Slot]], dict[str, Kind]]


@dataclass(frozen=True, slots=True)
class Way:
    """How weights are held and computed with."""

    name: str
    kinds: Kinds
    """The type of every matrix; empty: bf16."""
    dtype: torch.dtype = torch.float32


def option(value: str) -> Kinds:
    """What `--quantize` does."""
    return lambda tensors, places: choose_kinds(tensors, places, value, CPU)


def uniform(body: Kind, head: Kind) -> Kinds:
    """One type for the layers, one for the embedding and the head."""
    return lambda tensors, places: {
        t.name: head if t.name in HEAD else body
        for t in tensors
        if t.name in places and places[t.name].is_matrix
    }


PLAIN = Way("bf16", option("none"))
WAYS = (
    Way("bf16, bf16 activations", option("none"), torch.bfloat16),
    Way("int8", option("int8")),
    Way("int4", option("int4")),
    Way("all but the head in Q4_1", uniform(Kind.Q4_1, Kind.Q8_0)),
    Way("all in Q4_1", uniform(Kind.Q4_1, Kind.Q4_1)),
)


@dataclass(frozen=True, slots=True)
class Quality:
    """One line of the table."""

    way: str
    kl: float
    kl_error: float
    """Standard error of the mean."""
    same_first: float
    """Share of the tokens after which the likeliest next token is that of bf16."""
    perplexity: float
    bits: float
    """Bits a weight, norms and biases included."""


def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole window: [T, heads, head_dim]."""
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@torch.inference_mode()
def log_probabilities(network: Network, windows: Iterable[list[int]]) -> list[Tensor]:
    """Of every next token, [T, vocab_size] a window."""
    model, found = Decoder(network), []
    for window in windows:
        hidden = model.forward(torch.tensor(window), torch.arange(len(window)), attend)
        found.append(F.log_softmax(model.logits(hidden).float(), dim=-1))
    return found


def compare(
    windows: list[list[int]], reference: list[Tensor], other: list[Tensor], way: str, bits: float
) -> Quality:
    """The distributions `other` against those of the reference."""
    divergences, same, losses = [], [], []
    for window, p, q in zip(windows, reference, other, strict=True):
        divergences.append((p.double().exp() * (p.double() - q.double())).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
        losses.append(-q[:-1].gather(1, torch.tensor(window[1:]).unsqueeze(1)).double())
    kl = torch.cat(divergences)
    return Quality(
        way,
        kl.mean().item(),
        kl.std().item() / math.sqrt(len(kl)),
        torch.cat(same).mean().item(),
        torch.cat(losses).mean().exp().item(),
        bits,
    )


def shuffled(tensors: Mapping[str, Tensor], spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """The same network with its channels in another order: the residual stream, the inside of every MLP, and the
    inside of every head's values.
    """
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    attention, feed_forward = spec.attention, spec.layers[0].feed_forward
    assert isinstance(feed_forward, FeedForward)
    dim = attention.head_dim
    stream, inner, head = order(spec.hidden_size), order(feed_forward.size), order(dim)
    values = torch.arange(attention.kv_heads * dim).view(-1, dim)[:, head].flatten()
    mixed = torch.arange(attention.heads * dim).view(-1, dim)[:, head].flatten()
    # Which channels the rows (or the numbers of a vector) and the columns are; None where they keep their order.
    channels: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "embed_tokens": (None, stream),
        "lm_head": (None, stream),
        "norm": (stream, None),
        "input_layernorm": (stream, None),
        "post_attention_layernorm": (stream, None),
        "q_proj": (None, stream),
        "k_proj": (None, stream),
        "v_proj": (values, stream),
        "o_proj": (stream, mixed),
        "gate_proj": (inner, stream),
        "up_proj": (inner, stream),
        "down_proj": (stream, inner),
        "q_norm": (None, None),
        "k_norm": (None, None),
    }
    result = {}
    for name, tensor in tensors.items():
        rows, columns = channels[name.split(".")[-2]]
        tensor = tensor if rows is None else tensor[rows]
        result[name] = tensor if columns is None or tensor.ndim == 1 else tensor[:, columns]
    return result


def build(spec: ModelSpec, tensors: Mapping[str, Tensor], way: Way, positions: int) -> Network:
    """A network of the weights, held in some way."""
    stored = [_stored(name, tensor) for name, tensor in tensors.items()]
    kinds = way.kinds(stored, match(spec, stored, NAMES))
    return fill_network(spec, stored, way.dtype, CPU, positions=positions, kinds=kinds)


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    def parts() -> Iterable[tuple[int, Tensor]]:
        step = max(1, (1 << 15) // tensor.shape[1])
        return ((start, tensor[start : start + step]) for start in range(0, len(tensor), step))

    return StoredTensor(name, tuple(tensor.shape), tensor.nbytes, lambda out: out.copy_(tensor), parts=parts)


def measure(name: str, text: str, tokens: int) -> list[Quality]:
    """All ways, the reference first."""
    files = resolve(name)
    ids = load_tokenizer(files).encode(text)[:tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    whole = load_model(files, dtype=torch.bfloat16, device=CPU, context_length=WINDOW, quantize="none")
    spec = whole.spec
    tensors = shared_tensors(whole)
    if files.gguf is not None:
        tensors = shuffled(tensors, spec)
    del whole
    numbers = sum(t.numel() for n, t in tensors.items() if not (spec.tied and n == HEAD[1]))
    plain = build(spec, tensors, PLAIN, WINDOW)
    reference = log_probabilities(plain, windows)
    del plain
    results = [compare(windows, reference, reference, "bf16", 16.0)]
    for way in WAYS:
        model = build(spec, tensors, way, WINDOW)
        bits = 8 * model.nbytes / numbers if model.is_quantized else 16.0
        results.append(compare(windows, reference, log_probabilities(model, windows), way.name, bits))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="how much of the text")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    results = measure(arguments.model, arguments.text.read_text(encoding="utf-8"), arguments.tokens)
    print(f"{'weights':30}{'bits':>6}{'KL, nats':>18}{'same first':>12}{'perplexity':>12}")
    for line in results:
        kl = f"{line.kl:.5f} ± {line.kl_error:.5f}"
        print(f"{line.way:30}{line.bits:6.2f}{kl:>18}{line.same_first:12.1%}{line.perplexity:12.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(line) for line in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
