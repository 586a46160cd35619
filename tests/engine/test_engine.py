"""The engine with a tiny model: what a stream gives, what it costs, how it ends."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ContextFullError, EngineError, FinishReason, SamplingParams
from engine.cache.rows import Rows
from tests.counting import until
from tests.engine.tiny import TinyEngine, close_to, tiny_engine
from tests.models.checkpoints import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT = torch.randint(256, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def ids(engine: TinyEngine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [event.token_id for event in engine.stream(prompt, params)]


def test_chunks_cached_prefixes_and_decoding_give_the_logits_of_one_forward(engine: TinyEngine) -> None:
    """Prefill in chunks, decode, then the same path again from the cache: all equal to a plain forward."""
    generated = ids(engine, PROMPT)
    stream = PROMPT + generated
    reference = run(engine.scripted.model, stream)
    for i, logits in enumerate(engine.scripted.logits_seen):
        assert close_to(logits, reference[len(PROMPT) - 1 + i])
    engine.scripted.logits_seen.clear()
    before = engine.scripted.rows_computed
    again = ids(engine, stream[:-1], SamplingParams(temperature=0.0, max_tokens=1))
    assert again == generated[-1:]
    assert engine.scripted.rows_computed - before == 1, "output is cached like input"
    assert close_to(engine.scripted.logits_seen[0], reference[-2])


def test_warm_computes_what_is_missing_to_the_token(engine: TinyEngine) -> None:
    assert engine.warm(PROMPT[:70]) == 70
    assert engine.warm(PROMPT[:70]) == 0
    assert engine.warm([*PROMPT[:50], 7, 8]) == 2
    assert engine.warm(PROMPT[:71]) == 1
    engine.evict_all()
    assert engine.warm(PROMPT[:70]) == 70


def test_a_seed_gives_the_same_text_cached_or_not(engine: TinyEngine) -> None:
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=40)
    assert ids(engine, PROMPT, params) == ids(engine, PROMPT, params)
    assert ids(engine, PROMPT, params) != ids(
        engine, PROMPT, SamplingParams(temperature=1.2, seed=12, max_tokens=40)
    )


def test_closing_the_generator_cancels_and_keeps_the_rows(engine: TinyEngine) -> None:
    stream = engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=500))
    got = [next(stream).token_id for _ in range(5)]
    stream.close()
    until(lambda: engine.figures().blocks_held == 0)
    assert engine.warm(PROMPT + got[:4]) == 0


def test_streams_of_several_threads_run_side_by_side(engine: TinyEngine) -> None:
    prompts = [PROMPT[i : i + 40] for i in range(4)]
    alone = [ids(engine, prompt) for prompt in prompts]
    engine.evict_all()
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: ids(engine, prompts[i])})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == alone


def test_an_answer_stops_at_the_end_of_the_context_and_keeps_its_text(folder: Path) -> None:
    with tiny_engine(folder, context=64, num_blocks=17) as engine:
        sequence = engine.start(Rows.of(PROMPT[:50]), SamplingParams(temperature=0.0))
        events = list(engine.events(sequence))
        assert sequence.finish_reason is FinishReason.CONTEXT_FULL
        assert len(events) == 64 - 50
        with pytest.raises(ContextFullError) as caught:
            next(engine.stream(PROMPT[:64]))
        assert (caught.value.needed, caught.value.available) == (65, 64)
        assert engine.warm(PROMPT[:64]) == 14
        assert ids(engine, PROMPT[60:80]), "a full cache makes room"


def test_the_max_of_tokens_and_the_end_of_turn(engine: TinyEngine) -> None:
    script = engine.tokenizer.encode("hello<|im_end|>")
    engine.scripted.script = list(script)
    sequence = engine.start(Rows.of(PROMPT), SamplingParams(temperature=0.0))
    events = list(engine.events(sequence))
    assert [event.token_id for event in events] == script
    assert "".join(event.text for event in events) == "hello"
    assert sequence.finish_reason is FinishReason.EOS
    engine.scripted.script = list(script)
    sequence = engine.start(Rows.of(PROMPT), SamplingParams(temperature=0.0, max_tokens=2))
    assert "".join(event.text for event in engine.events(sequence)) == "he"
    assert sequence.finish_reason is FinishReason.LENGTH
    engine.scripted.script.clear()


def test_a_step_that_fails_ends_its_stream_with_one_line_and_the_engine_lives_on(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with monkeypatch.context() as patch:
        patch.setattr(engine.scripted.model, "forward", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(EngineError, match="Out of memory") as caught:
            ids(engine, PROMPT)
    assert "\n" not in str(caught.value)
    engine.check()
    assert len(ids(engine, PROMPT)) == 12


def test_bad_prompts_are_refused_with_what_is_wrong(engine: TinyEngine) -> None:
    with pytest.raises(EngineError, match="empty"):
        next(engine.stream([]))
    with pytest.raises(EngineError, match="no token 999999"):
        next(engine.stream([1, 999999]))
    with pytest.raises(EngineError, match="no token -1"):
        engine.warm([-1])


def test_a_closed_engine_ends_its_streams_and_says_so(folder: Path) -> None:
    with tiny_engine(folder) as engine:
        stream = engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=800))
        next(stream)
        engine.close()
        assert len(list(stream)) < 800
        with pytest.raises(EngineError, match="closed"):
            engine.warm([1])
        engine.close()


def test_the_kv_cache_never_grows(engine: TinyEngine) -> None:
    before = engine.figures().kv_bytes
    ids(engine, PROMPT)
    figures = engine.figures()
    assert figures.kv_bytes == before == engine.pieces.cache.kv.nbytes
    assert (
        figures.blocks_free + figures.blocks_cached + figures.blocks_held == engine.pieces.blocks.num_blocks
    )


def test_figures_of_a_turn_add_up(engine: TinyEngine) -> None:
    engine.warm(PROMPT[:100])
    sequence = engine.start(Rows.of(PROMPT), GREEDY)
    list(engine.events(sequence))
    stats = sequence.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.prefilled_tokens) == (150, 100, 50)
    assert stats.generated_tokens == 12
    assert 0 < stats.prefill_s <= stats.ttft_s
    assert stats.decode_tokens_per_s == pytest.approx(11 / stats.decode_s)


def test_the_authors_settings_come_first_then_ours_then_what_the_person_says(engine: TinyEngine) -> None:
    assert engine.default_params().temperature == 0.7
    engine.generation_defaults = {"temperature": 0.6, "top_k": 20}
    params = engine.default_params(top_k=5, seed=3)
    assert params == SamplingParams(temperature=0.6, top_k=5, seed=3)


def test_tokens_that_the_authors_suppress_are_not_sampled(engine: TinyEngine) -> None:
    def answer(**settings: Any) -> list[int]:
        params = engine.default_params(temperature=0.0, max_tokens=12, **settings)
        return [event.token_id for event in engine.stream(PROMPT, params) if event.token_id is not None]

    free = answer()
    engine.tokenizer.suppressed_ids = frozenset({*free, 10**6})
    try:
        assert not set(answer()) & set(free)
        assert answer(logit_bias={free[0]: 0.0})[0] == free[0], "a bias of the request counts"
    finally:
        engine.tokenizer.suppressed_ids = frozenset()
