"""Tiny networks with recurrent layers and attention, and engines around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.network import Network
from models.recurrences import DeltaNet, Mamba2
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope
from models.text.tokenizer import Tokenizer
from tests.engine.tiny import TinyEngine, tiny_engine
from tests.models.test_reference import checkpoint, network_of

NET = Layer(DeltaNet(2, 4, 16, 16, conv_width=4), FeedForward(48))
MAMBA = Layer(Mamba2(4, 16, 16, 2), FeedForward(48))
PLAIN = Layer(Attention(2, 1, 32, rope=Rope()), FeedForward(48))
SPEC = ModelSpec("Hybrid", 272, 48, 1024, (NET, PLAIN, MAMBA), Norm())


def hybrid_network(spec: ModelSpec = SPEC, seed: int = 0) -> Network:
    """Its weights are random; its states forget at the rates of a real one."""
    tensors, names = checkpoint(spec, seed)
    for name in tensors:
        if name.endswith("decay"):
            tensors[name] = -tensors[name].abs()
    return network_of(spec, tensors, names)


@contextmanager
def hybrid_engine(
    tokenizer: Tokenizer | None = None, network: Network | None = None, native: bool = False, **options: Any
) -> Iterator[TinyEngine]:
    """An engine whose memory is NaN wherever nobody has written; with `native`, kernels compute all."""
    network = network or hybrid_network()
    options = {"context": 420, "fused": native} | options
    with tiny_engine(Path(), tokenizer=tokenizer, network=network, **options) as engine:
        assert engine.pieces.runner.all_native == native
        cache = engine.pieces.cache
        assert cache.states is not None
        for part in cache.parts:
            part[:, :, : -engine.block_size] = float("nan")
        for states in cache.states.layers.values():
            states.fill_(float("nan"))
        yield engine
