"""The engine on a GPU with the reference backend: the same logits and the same behaviour as on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig

from engine import EngineError, SamplingParams
from engine.cache.host_memory import PromptCosts
from tests.engine.tiny import TinyEngine, close_to, say, tiny_engine
from tests.gpu.engines import an_engine
from tests.models.checkpoints import random_model, run_reference, tiny_llama, tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONFIG = tiny_qwen3(vocab_size=272, max_position_embeddings=1024)
PROMPT = torch.randint(256, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def engine(folder: Path) -> Iterator[TinyEngine]:
    with tiny_engine(folder, CONFIG, device="cuda") as engine:
        yield engine


def test_chunks_prefixes_and_decoding_give_the_logits_of_transformers(engine: TinyEngine) -> None:
    events = list(engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=12)))
    stream = PROMPT + [event.token_id for event in events]
    reference = run_reference(random_model(CONFIG), stream)
    for i, logits in enumerate(engine.scripted.logits_seen):
        assert close_to(logits.cpu(), reference[len(PROMPT) - 1 + i], 1e-3)
    assert engine.warm(stream[:-1]) == 0


def test_a_sliding_window_hides_what_is_before_it_while_decoding_too(tmp_path: Path) -> None:
    window = MistralConfig(**{**tiny_llama(vocab_size=272).to_dict(), "sliding_window": 24})
    write_checkpoint(tmp_path, window)
    with an_engine(tmp_path, fused=True, context=200) as engine:
        events = list(engine.stream(PROMPT[:100], SamplingParams(temperature=0.0, max_tokens=40)))
    tokens = [event.token_id for event in events]
    reference = run_reference(random_model(window), PROMPT[:100] + tokens)[99:-1]
    chosen = reference.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert (reference.max(1).values - chosen <= 2e-2 * reference.abs().max()).all()


def test_a_seed_gives_the_same_text(engine: TinyEngine) -> None:
    params = SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.1, seed=5)
    texts = [[e.token_id for e in engine.stream(PROMPT, params)] for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_chat_computes_only_what_is_new(engine: TinyEngine, think_cache: str) -> None:
    chat = engine.chat(think_cache=think_cache)
    for i in range(3):
        engine.scripted.script = say(engine, "some thoughts", f"answer {i}")
        list(chat.send(f"message {i}", SamplingParams(temperature=0.0)))
        chat.settle(wait=True)
        if i:
            new = engine.tokenizer.encode(f"message {i}<|im_end|>\n<|im_start|>assistant\n")
            assert chat.last.stats.prefilled_tokens == len(new)


def test_bf16_chats(folder: Path) -> None:
    with tiny_engine(folder, CONFIG, device="cuda", dtype=torch.bfloat16) as engine:
        assert len(list(engine.stream(PROMPT, SamplingParams(temperature=0.7, max_tokens=8, seed=1)))) <= 8


def test_evicted_blocks_come_back_from_pinned_memory_bit_by_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache of 40 blocks and prompts of 37, each evicts the one before, whose rows come back unchanged."""
    # Whether offloading pays is measured, so it depends on other users of the GPU and the bus.
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    options = {"context": 150, "num_blocks": 40, "offload": 1 << 28}
    with tiny_engine(folder, CONFIG, device="cuda", dtype=torch.bfloat16, **options) as engine:

        def rows(prompt: list[int]) -> torch.Tensor:
            def job() -> torch.Tensor:
                slots = engine.pieces.cache.slots(engine.pieces.blocks.path(prompt), 0, len(prompt))
                return torch.cat(
                    [engine.pieces.cache.kv[:, :, first:end] for first, end in slots], dim=2
                ).clone()

            return engine.loop.call(job)

        assert engine.pieces.cache.host is not None
        engine.pieces.cache.host.prepare(wait=True)
        prompts = [[i, *PROMPT[2:]] for i in range(6)]
        computed = []
        for prompt in prompts:
            assert engine.warm(prompt) == len(prompt)
            computed.append(rows(prompt))
        for _ in range(3):
            for prompt, before in zip(prompts, computed, strict=True):
                assert engine.warm(prompt) == 0
                assert torch.equal(rows(prompt), before)
                engine.check()
        figures = engine.figures().offload
        assert figures is not None
        assert figures.brought_s is not None
        assert figures.restored_tokens > 17 * 140


def test_a_card_that_fills_up_in_mid_chat_ends_the_turn_with_a_line_and_the_chat_lives_on(
    tmp_path: Path,
) -> None:
    """Another program takes what is free: a long message does not fit any more, and fits again when that ends."""
    wide = tiny_qwen3(vocab_size=272, max_position_embeddings=1024, intermediate_size=16384)
    with tiny_engine(tmp_path, wide, device="cuda", max_chunk=1024) as engine:
        chat, params = engine.chat(), SamplingParams(temperature=0.0, max_tokens=4)
        list(chat.send("hello", params))
        before = [turn.user for turn in chat.turns]
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(used / total)
        try:
            with pytest.raises(EngineError, match="Out of memory; the conversation is intact") as caught:
                list(chat.send("a long message " * 55, params))
            assert "\n" not in str(caught.value)
            assert [turn.user for turn in chat.turns] == before
            assert torch.cuda.memory_reserved() <= used
            list(chat.send("short", params))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        list(chat.send("a long message " * 20, params))
        assert [turn.user for turn in chat.turns] == [*before, "short", "a long message " * 20]
        engine.check()
