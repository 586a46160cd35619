"""Measure the inputs of a network's matrices on a text, and how much an error of their outputs matters."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import ModelError
from models.network import (
    AttentionWeights,
    ConvolutionWeights,
    ExpertWeights,
    FeedForwardWeights,
    LatentWeights,
    Linear,
    Network,
)
from models.progress import OnProgress, Progress
from models.reference.decoder import Decoder

Place = tuple[str, int | None]
"""The group of a matrix (see models.weights.slots), and the expert."""

_GROUPS: dict[type, dict[str, str]] = {
    AttentionWeights: {"qkv": "qkv", "out": "out", "gate": "attention_gate"},
    ConvolutionWeights: {"inputs": "conv_in", "out": "conv_out"},
    LatentWeights: {"q": "q", "q_b": "q_b", "kv_a": "kv_a", "out": "out"},
}
"""The group of each linear layer of a mixer, by its field."""


@dataclass(slots=True)
class ActivationSums:
    """Sums over the tokens that went through a linear layer."""

    inputs: Tensor
    """fp32 [columns]: sums of the squared inputs."""
    outputs: Tensor
    """fp32 [rows]: sums of the squared gradients of the outputs."""
    tokens: int = 0


@dataclass(slots=True)
class Activations:
    """The measurements of a whole network."""

    seen: dict[Place, ActivationSums] = field(default_factory=dict)
    tokens: int = 0
    """Number of tokens of the text."""

    def inputs(self, place: Place) -> Tensor | None:
        """Return the mean squares of the inputs [columns], never 0; None for an expert that no token chose."""
        seen = self.seen.get(place)
        if seen is None or not seen.tokens:
            return None
        squares = seen.inputs / seen.tokens
        # A column that this text does not use may matter for another text.
        return squares + 0.01 * squares.mean() + 1e-12

    def outputs(self, place: Place) -> Tensor | None:
        """Return [rows]: by how much a unit of squared error of each output raises a token's KL divergence."""
        seen = self.seen.get(place)
        return None if seen is None else 0.5 * seen.outputs / max(1, self.tokens)


def measure(
    network: Network, windows: Sequence[list[int]], on_progress: OnProgress | None = None
) -> Activations:
    """Run texts through a network of plain numbers, forwards and backwards.

    Gradients are taken for tokens drawn from the network's own predictions. Their squares are the Fisher information,
    which tells by how much a small error changes the distribution. Raises ModelError if a prediction is not a number.
    """
    found = Activations()
    model = _Measured(network, found)
    generator = torch.Generator().manual_seed(0)
    read = network.nbytes

    def report(number: int) -> None:
        if on_progress is not None:
            on_progress(Progress("quantize", "activations", number * read, len(windows) * read))

    for number, window in enumerate(windows):
        report(number)
        with torch.enable_grad():
            hidden = model.forward(torch.tensor(window), torch.arange(len(window)), Attend(network))
            logits = model.logits(hidden).float()
            if not bool(logits.isfinite().all()):
                raise ModelError(
                    "The model's output is not a number, so it cannot be calibrated; its weights are damaged: "
                    "download it again."
                )
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = -F.log_softmax(logits, dim=-1).gather(1, drawn).sum()
            torch.autograd.backward(loss)
        found.tokens += len(window)
    report(len(windows))
    return found


class _Measured(Decoder):
    """A decoder that records the inputs and output gradients of its linear layers."""

    def __init__(self, network: Network, found: Activations) -> None:
        super().__init__(network)
        self._found = found
        self._places = {id(linear): place for place, linear in places(network)}

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return super().embed(token_ids, positions).detach().requires_grad_()

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        out = super()._linear(linear, x)
        place = self._places.get(id(linear))
        if place is not None and len(x):
            seen = self._found.seen.setdefault(
                place, ActivationSums(torch.zeros(linear.columns), torch.zeros(linear.rows))
            )
            seen.inputs += x.detach().float().square().sum(0)
            seen.tokens += len(x)

            def look(gradient: Tensor) -> None:
                seen.outputs.add_(gradient.float().square().sum(0))

            out.register_hook(look)  # type: ignore[no-untyped-call]
        return out


def places(network: Network) -> Iterator[tuple[Place, Linear]]:
    """Yield the linear layers that may be quantised, by the group of their weights; the head is left out."""
    if (inputs := network.layer_inputs) is not None:
        yield ("layer_projection.weight", None), inputs.projection
    if (streams := network.streams) is not None:
        for index, (given, out) in enumerate(zip(streams.inputs, streams.outputs, strict=True)):
            yield (f"stream_in.{index}.weight", None), given
            yield (f"stream_out.{index}.weight", None), out
    for index, layer in enumerate(network.layers):
        at = f"layers.{index}."
        if layer.laurel is not None:
            yield (f"{at}laurel_left.weight", None), layer.laurel.left
            yield (f"{at}laurel_right.weight", None), layer.laurel.right
        if layer.input is not None:
            yield (f"{at}input_gate.weight", None), layer.input.gate
            yield (f"{at}input_out.weight", None), layer.input.out
        for name, group in _GROUPS.get(type(layer.mixer), {}).items():
            if (linear := getattr(layer.mixer, name)) is not None:
                yield (f"{at}{group}.weight", None), linear
        feed = layer.feed_forward
        if isinstance(feed, ExpertWeights):
            for number, expert in enumerate(feed.experts):
                yield from _feed(f"{at}experts.", expert, number)
            if feed.shared is not None:
                yield from _feed(f"{at}shared.", feed.shared, None)
        elif feed is not None:
            yield from _feed(at, feed, None)


def _feed(at: str, feed: FeedForwardWeights, expert: int | None) -> Iterator[tuple[Place, Linear]]:
    yield (f"{at}gate_up.weight", expert), feed.gate_up
    yield (f"{at}down.weight", expert), feed.down


class Attend:
    """Causal attention over one whole text, as the network's layers specify it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self._network.spec.layers[layer_index].attention
        if spec.kv_from is not None:
            k, v = self._kept[spec.kv_from]
        self._kept[layer_index] = k, v
        sinks = self._network.layers[layer_index].attention.sinks
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
        scores = torch.matmul(q.transpose(0, 1), keys.transpose(1, 2)).float() * spec.softmax_scale
        if spec.score_cap is not None:
            scores = torch.tanh(scores / spec.score_cap) * spec.score_cap
        rows = torch.arange(len(q))
        distance = rows.unsqueeze(1) - rows
        seen = distance >= 0
        if spec.window is not None:
            seen &= distance < spec.window
        if spec.chunk is not None:
            seen &= rows // spec.chunk == (rows // spec.chunk).unsqueeze(1)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
            shares = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return torch.matmul(shares.to(q.dtype), values).transpose(0, 1)

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        """See `models.reference.attention.ConvolutionRows`."""
        padded = F.pad(x, (0, 0, width - 1, 0))
        return [padded[first : first + len(x)] for first in range(width)]

    def latent_rows(self, layer_index: int, rows: Tensor) -> Iterable[tuple[int, Tensor]]:
        """See `models.reference.attention.LatentRows`."""
        return [(len(rows), rows)]


def divergence(network: Network, other: Network, windows: Sequence[list[int]]) -> float:
    """Return the mean KL divergence in nats of the predictions of `other` from those of `network`, over texts."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            p, q = (
                F.log_softmax(
                    model.logits(
                        model.forward(torch.tensor(window), torch.arange(len(window)), Attend(model.network))
                    ).double(),
                    dim=-1,
                )
                for model in (Decoder(network), Decoder(other))
            )
            total += float((p.exp() * (p - q)).sum())
            count += len(window)
    return total / max(1, count)
