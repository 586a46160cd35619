"""Greedy text beside llama.cpp on the same GGUF file. CHATTERM_LLAMA_PYTHON names an interpreter with llama-cpp-python
where this one has none; without either, or without the default model, there is nothing to compare with."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.peers.llama_cpp_python import LlamaCppPython
from engine import Engine, SamplingParams
from engine.batch import StepBatch
from engine.execute.runner import Runner

TOKENS = 24
NEAR = 0.5
"""Two logits are a near tie within this. Both programs round activations to int8 and the KV cache to 16 bits, each in
its own way: of the fifty likeliest tokens the logit that differs most differs by 0.3 as a rule."""
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "Name three primary colours.",
    "Who wrote Romeo and Juliet?",
    "Explain gravity to a child.",
    "What is 12 times 12?",
    "Translate 'good morning' into French.",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Tell me a joke about cats.",
    "List the planets of the solar system.",
    "How far away is the moon?",
    "What is photosynthesis?",
    "Write a sentence with the word 'river'.",
    "Summarise the story of Cinderella.",
    "What is the opposite of cold?",
    "Suggest a name for a small boat.",
    "Wie heißt die Hauptstadt von Italien?",
)


@pytest.fixture(scope="module")
def peer(smollm2: Path) -> Iterator[LlamaCppPython]:
    python = os.environ.get("CHATTERM_LLAMA_PYTHON")
    if python is None and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed; CHATTERM_LLAMA_PYTHON may name a Python that has it")
    with LlamaCppPython(python or sys.executable, smollm2, 2, 512) as peer:
        yield peer


def test_the_first_token_that_differs_from_llama_cpp_is_a_near_tie_in_both(
    peer: LlamaCppPython, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    run = Runner.run

    def record(self: Runner, batch: StepBatch) -> list[Tensor]:
        found = run(self, batch)
        seen.extend(logits.float().clone() for logits in found)
        return found

    monkeypatch.setattr(Runner, "run", record)
    engine = Engine.load(str(smollm2), device="cpu", context=512)
    same = 0
    try:
        for question in QUESTIONS:
            prompt = engine.tokenizer.encode(
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            )
            seen.clear()
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            ours = [event.token_id for event in engine.stream(prompt, params)]
            steps = peer.greedy(prompt, len(ours))
            for mine, logits, step in zip(ours, seen, steps, strict=True):
                theirs = next(iter(step))
                if mine != theirs:
                    assert float(logits[mine] - logits[theirs]) < NEAR, question
                    assert mine in step, question
                    assert step[theirs] - step[mine] < NEAR, question
                    break
                same += 1
    finally:
        engine.close()
    # Ties are rare: most answers are the same for long.
    assert same > len(QUESTIONS) * TOKENS // 2
