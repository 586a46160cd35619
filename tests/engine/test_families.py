"""Every family in the engine: prompts in small chunks, reused blocks, crossed windows, against transformers."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from engine.execute.cpu.held_weights import read_model
from engine.schedule.loop import Loop
from models.load import load_model
from tests.engine.tiny import TinyEngine, tiny_tokenizer
from tests.models.checkpoints import files_of, random_model, run_reference, write_checkpoint
from tests.models.families import FAMILIES

CPU = torch.device("cpu")
COUNTS = (256, 30, 30)
PROMPT = torch.randint(150, (70,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = (PROMPT, PROMPT[:45], [*PROMPT[:61], 7, 8])


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = deepcopy(FAMILIES[name])
    config.max_position_embeddings = 512
    network = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    tokenizer = tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    engine = TinyEngine(  # not scripted: what computes is what `build` picks
        Loop(),
        network,
        tokenizer,
        name=name,
        device=CPU,
        dtype=torch.float32,
        block_size=4,
        max_chunk=8,
        threads=1,
    )
    answers = []
    try:
        for prompt, count in zip(PROMPTS, COUNTS, strict=True):
            greedy = SamplingParams(temperature=0.0, max_tokens=count)
            answers.append([event.token_id for event in engine.stream(prompt, greedy)][:count])
        engine.check()
    finally:
        engine.close()
    model = random_model(config)
    for prompt, count, answer in zip(PROMPTS, COUNTS, answers, strict=True):
        assert len(answer) == count
        # One pass over prompt and answer: each token is the best after those before it.
        logits = run_reference(model, prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


def test_the_context_that_a_person_asks_for_decides_on_longrope(tmp_path: Path) -> None:
    files = files_of(write_checkpoint(tmp_path, FAMILIES["phi3 longrope"]))
    for context, is_long in ((None, True), (33, True), (32, False)):
        network, _ = read_model(files, torch.float32, CPU, "auto", None, context)
        rope = network.spec.attention.rope
        assert rope is not None
        assert (rope.long_factors != rope.frequency_factors) == is_long
        assert network.positions == 256
