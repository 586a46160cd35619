"""The engine in thirty lines, without a chat and without a server: tokens in, tokens out."""

from concurrent.futures import ThreadPoolExecutor
from math import exp

from engine.engine import Engine
from engine.params import SamplingParams

engine = Engine.load("smollm2")
tokenizer = engine.tokenizer
prompt = tokenizer.encode("Once upon a time, in a village by the sea, there lived")

# One answer, token by token, with the three tokens that were likeliest in its place.
for event in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=12, logprobs=3)):
    likeliest = [f"{tokenizer.decode([token])!r} {exp(logprob):.0%}" for token, logprob in event.top]
    print(f"{event.text!r:14} of {', '.join(likeliest)}")


def draw(seed: int) -> str:
    """Return another answer to the same prompt, as the seed has it."""
    params = SamplingParams(temperature=0.8, max_tokens=20, seed=seed)
    return "".join(event.text for event in engine.stream(prompt, params))


# Answers that are asked for at once are computed together, one token of each per step.
with ThreadPoolExecutor() as pool:
    print(*pool.map(draw, range(3)), sep="\n")

print(f"{engine.kept_tokens(prompt)} of {len(prompt)} prompt tokens are in the cache.")
engine.close()
