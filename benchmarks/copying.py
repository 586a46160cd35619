"""Weights that copy: an answer goes on as its prompt did, but for changes, whatever the layers compute.

After each token comes the one that is said to follow it: the embedding is so loud that the layers hardly count, and the
head knows the token by it. All else is as ever: steps, sampling, and suffix matching, which has to find the copy.
"""

from random import Random

import torch

from models.network import Network

_LOUD = 20_000.0
"""So many times its size the embedding gets; what the layers add to it counts for nothing then."""


def copied(vocab_size: int, prompt: int, answer: int, every: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt of so many tokens, no two of which are the same, and an answer that copies it from its beginning but for
    one other token in `every`."""
    random = Random(seed)
    tokens = random.sample(range(vocab_size), prompt + answer // every)
    said, fresh = tokens[: min(prompt - 1, answer)], iter(tokens[prompt:])
    said[every - 1 :: every] = [next(fresh) for _ in said[every - 1 :: every]]
    return tokens[:prompt], said


@torch.no_grad()
def teach(network: Network, text: list[int]) -> None:
    """Have each of these tokens, no two of which are the same, followed by the next one. The head is a tensor of its
    own."""
    assert not network.spec.tied
    embedding, head = network.embedding.data, network.head.weight
    before = torch.tensor(text[:-1], device=embedding.device)
    after = torch.tensor(text[1:], device=embedding.device)
    head[after] = embedding[before].to(head.dtype)
    embedding.mul_(_LOUD)
