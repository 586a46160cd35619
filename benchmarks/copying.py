"""Weights that copy: whatever the layers compute, an answer continues as its prompt did, apart from given changes.

Each token is followed by the one that was set to follow it: the embedding is so large that the layers hardly matter,
and the head recognises the token by it. Everything else is real: steps, sampling, and suffix matching, which has to
find the copy.
"""

from random import Random

import torch

from models.network import Network

_LOUD = 20_000.0
"""Factor of the embedding, with which the layers' additions no longer matter."""


def copied(vocab_size: int, prompt: int, answer: int, every: int, seed: int) -> tuple[list[int], list[int]]:
    """Return a prompt of distinct tokens, and an answer that copies it, but for one different token in `every`."""
    random = Random(seed)
    tokens = random.sample(range(vocab_size), prompt + answer // every)
    said, fresh = tokens[: min(prompt - 1, answer)], iter(tokens[prompt:])
    said[every - 1 :: every] = [next(fresh) for _ in said[every - 1 :: every]]
    return tokens[:prompt], said


@torch.no_grad()
def teach(network: Network, text: list[int]) -> None:
    """Make each of these distinct tokens be followed by the next one. The head must be a tensor of its own."""
    assert not network.spec.tied
    embedding, head = network.embedding.data, network.head.weight
    before = torch.tensor(text[:-1], device=embedding.device)
    after = torch.tensor(text[1:], device=embedding.device)
    head[after] = embedding[before].to(head.dtype)
    embedding.mul_(_LOUD)
