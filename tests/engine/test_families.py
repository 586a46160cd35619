"""Every family in the engine: prompts in small chunks, reused blocks, crossed windows, against transformers."""

import os
from copy import deepcopy
from itertools import count
from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from engine.execute.build_options import BuildOptions
from engine.execute.loading import load_here, plan_here
from engine.params import LoadOptions
from engine.schedule.loop import Loop
from models.loading.load import load_model
from tests.engine.test_exactness import CONTEXT, Fire
from tests.engine.tiny import TinyEngine, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import files_of, random_model, run_reference, write_checkpoint
from tests.models.families import FAMILIES, RECURRENT

CPU = torch.device("cpu")
STEPS = int(os.environ.get("CHATTERM_FAMILY_STEPS", "4"))
LOGITS = 5
"""So many at least are compared for each policy, whatever chance does."""
COUNTS = (256, 30, 30)
PROMPT = torch.randint(150, (70,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = (PROMPT, PROMPT[:45], [*PROMPT[:61], 7, 8])
NETWORKS = FAMILIES | RECURRENT


@pytest.mark.parametrize("name", NETWORKS)
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = deepcopy(NETWORKS[name])
    config.get_text_config().max_position_embeddings = 512
    network = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    tokenizer = tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    engine = TinyEngine(  # not scripted: what computes is what `build` picks
        Loop(),
        network,
        tokenizer,
        BuildOptions(block_size=4, max_chunk=8, threads=1),
        name=name,
        device=CPU,
    )
    answers = []
    try:
        for prompt, most in zip(PROMPTS, COUNTS, strict=True):
            greedy = SamplingParams(temperature=0.0, max_tokens=most)
            answers.append([event.token_id for event in engine.stream(prompt, greedy)][:most])
        engine.check()
    finally:
        engine.close()
    model = random_model(config)
    for prompt, most, answer in zip(PROMPTS, COUNTS, answers, strict=True):
        assert len(answer) == most
        # One pass over prompt and answer: each token is the best after those before it.
        logits = run_reference(model, prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_with_thinking_have_the_logits_of_a_plain_forward(name: str, tmp_path: Path) -> None:
    """Think spans that are masked, prefixes that are found again, whatever is done in between."""
    config = deepcopy(FAMILIES[name])
    text = config.get_text_config()
    text.vocab_size = text.vocab_size_per_layer_input = 272
    text.max_position_embeddings = 512
    with tiny_engine(tmp_path, config, context=CONTEXT, max_chunk=16) as engine:
        fire = Fire(engine, list(FAMILIES).index(name))
        for step in count():
            fire.step()
            # With a window in every layer masked turns are answered as exact ones are: nobody holds what they need.
            masked = fire.compared["mask"] if engine.spec.window is None else LOGITS
            if step >= STEPS and min(masked, fire.compared["exact"]) >= LOGITS:
                break


def test_the_context_that_a_person_asks_for_decides_on_longrope(tmp_path: Path) -> None:
    files = files_of(write_checkpoint(tmp_path, FAMILIES["phi3 longrope"]))
    for context, is_long in ((None, True), (33, True), (32, False)):
        network = load_here(plan_here(files, torch.float32, CPU, LoadOptions(context=context)))
        rope = network.spec.attention.rope
        assert rope is not None
        assert (rope.long_factors != rope.frequency_factors) == is_long
        assert network.positions == 256
