"""The same conversation, parameters and seed give the same text, whatever was cached and however it came to be.

Random programs are run on an engine with a small cache, which checks every guess that it has. Each answer, and the bits
of all logits that it was drawn from, are compared with those of another engine, which has nothing cached, guesses
nothing and gets the whole conversation at once. That holds for quantised weights on a CPU, whose decode steps and
chunks of prompts add up in the same order.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from engine import Engine, SamplingParams
from engine.cache import kv_needs
from engine.cache.blocks import Key
from engine.cache.layer_groups import layer_groups
from engine.conversation.chat import Chat, Turn
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeLibrary
from engine.schedule.computing import Computing
from engine.schedule.scheduler import PromptChunk
from engine.store.disk import DiskTier
from models.features import Feature, features
from models.loading.load import load_model
from models.network import Network
from tests.covering import each_value_once
from tests.engine.inside import check_blocks, evict_all, offload
from tests.engine.speculation import speculate
from tests.engine.test_chat_paths import copies
from tests.engine.test_native_engine import CPU, a_native_engine
from tests.fresh import examples
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.families import tiny_gemma4, tiny_gpt_oss, tiny_lfm2
from tests.models.hybrids import tiny_qwen3_5

CONTEXT = 400
BLOCKS = CONTEXT // 4 + 10
"""Little more than one conversation: branches and what is prewarmed evict each other."""
SIZES: dict[str, Any] = {"vocab_size": 272, "hidden_size": 64, "max_position_embeddings": 512}
CONFIGS = {
    "all rows": tiny_qwen3(**SIZES),
    "windows": tiny_gemma4(
        **SIZES, vocab_size_per_layer_input=272, hidden_size_per_layer_input=32, sliding_window=9
    ),
    "windows and experts": tiny_gpt_oss(**SIZES, sliding_window=30),
    "convolutions": tiny_lfm2(**SIZES, num_attention_heads=4, num_key_value_heads=2, conv_L_cache=7),
    "recurrences": tiny_qwen3_5(**SIZES, linear_value_head_dim=32),
}
TEXTS = st.text("ab \n\u00e9", min_size=1, max_size=24).filter(str.strip)
STEPS = st.one_of(
    st.tuples(st.just("send"), TEXTS, st.integers(0, 20)),
    st.tuples(st.just("type and send"), TEXTS, st.integers(0, 20)),
    st.tuples(st.just("retry"), st.just(""), st.integers(0, 20)),
    st.tuples(st.just("stop and resume"), TEXTS, st.integers(0, 12)),
    st.tuples(st.just("settle"), st.just(""), st.integers(0, 1)),
    st.tuples(st.just("undo"), st.just(""), st.just(0)),
    st.tuples(st.just("branch"), st.just(""), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.just(""), st.integers(0, 100)),
    st.tuples(st.just("beside"), TEXTS, st.integers(0, 20)),
)


@dataclass
class Pair:
    """An engine to use, and one to ask afresh."""

    used: Engine
    fresh: Engine
    seen: dict[int, dict[tuple[Key, ...], bytes]]
    """The bits of the logits that followed some rows, by the runner that computed them."""

    def logits(self, engine: Engine) -> dict[tuple[Key, ...], bytes]:
        return self.seen.setdefault(id(engine.pieces.runner), {})


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("same")
    write_checkpoint(folder, CONFIGS[request.param])
    return load_model(files_of(folder), dtype=torch.bfloat16, device=CPU, quantize="int8")


@pytest.fixture(scope="module", params=["avx2", "avxvnni", "avx512", "dotprod", "i8mm"])
def pair(request: pytest.FixtureRequest, model: Network) -> Iterator[Pair]:
    variants = native.library().variants
    if request.param not in variants:
        pytest.skip(f"this machine does not run {request.param}")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(NativeLibrary, "best", property(lambda self: self.variants[request.param]))
        seen: dict[int, dict[tuple[Key, ...], bytes]] = {}
        run = Computing.run

        def record(
            self: Computing, chunks: list[PromptChunk], disk: DiskTier | None
        ) -> list[tuple[PromptChunk, list[Tensor]]]:
            found = run(self, chunks, disk)
            logits = seen.setdefault(id(self.runner), {})
            for chunk, rows in found:
                for count, row in enumerate(rows):
                    told = chunk.sequence.rows.copy()
                    told.extend(chunk.guesses[:count])
                    logits[tuple(told.keys)] = row.numpy().tobytes()
            return found

        patch.setattr(Computing, "run", record)
        patch.setattr(kv_needs, "MOST_MARKS", 8)
        options = {"dtype": torch.bfloat16, "context": CONTEXT}
        has_states = Feature.RECURRENCE in features(model.spec)
        draft = {"drafter": model, "draft_name": "itself"} if has_states else {}
        used = stack.enter_context(a_native_engine(model, num_blocks=BLOCKS, **options, **draft))
        fresh = stack.enter_context(a_native_engine(model, max_chunk=512, threads=1, **options))
        assert len(used.pieces.cache.pools) == len(layer_groups(model.spec, torch.bfloat16))
        speculate(used)
        fresh.engine_step.speculating = None
        yield Pair(used, fresh, seen)


@each_value_once
@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@examples(6, *HealthCheck)
@given(steps=st.lists(STEPS, min_size=3, max_size=10))
def test_the_text_of_a_seed_is_the_same_whatever_was_cached(
    pair: Pair, think_cache: str, steps: list[tuple[str, str, int]]
) -> None:
    evict_all(pair.used)
    chat = pair.used.chat(think_cache=think_cache)
    saved: list[list[Turn]] = [[]]
    for kind, text, number in steps:
        if chat.used_tokens > CONTEXT // 2:
            chat.load(copies(chat.turns[: len(chat.turns) // 2]))
        one(pair, chat, saved, kind, text, number)
        saved.append(copies(chat.turns))
        check_blocks(pair.used)


def one(pair: Pair, chat: Chat, saved: list[list[Turn]], kind: str, text: str, number: int) -> None:
    params = SamplingParams(speculation="auto", temperature=1.0, seed=number, max_tokens=4 + number)
    before = copies(chat.turns)
    match kind:
        case "send":
            list(chat.send(text, params))
            check(pair, chat, before, params)
        case "type and send":
            for end in range(1, len(text) + 1):
                chat.prepare(text[:end], wait=(end + number) % 3 == 0, params=params if number % 2 else None)
            list(chat.send(text, params))
            check(pair, chat, before, params)
        case "retry" if before:
            list(chat.retry(params))
            check(pair, chat, before[:-1], params)
        case "stop and resume":
            events = chat.send(
                text, SamplingParams(speculation="auto", temperature=1.0, seed=number, max_tokens=24)
            )
            for _ in range(1 + number % 5):
                next(events, None)
            events.close()  # type: ignore[attr-defined]
            if chat.last is not None and not chat.last.is_complete and len(chat.last.token_ids) < 24:
                if number % 2:
                    evict_all(pair.used)
                left = 24 - len(chat.last.token_ids)
                list(
                    chat.resume(
                        SamplingParams(speculation="auto", temperature=1.0, seed=number, max_tokens=left)
                    )
                )
            check(
                pair,
                chat,
                before,
                SamplingParams(speculation="auto", temperature=1.0, seed=number, max_tokens=24),
            )
        case "settle":
            chat.settle(wait=bool(number))
        case "undo":
            chat.undo()
        case "branch":
            chat.load(copies(saved[number % len(saved)]))
        case "evict":
            pair.used.loop.call(lambda: offload(pair.used.pieces.blocks, number))
        case "beside":
            ids = pair.used.tokenizer.encode(text)
            alone = [event.token_id for event in pair.fresh.stream(ids, params)]
            other = pair.used.stream(ids, params)
            begun = [next(other)]
            list(chat.send(text, params))
            assert [event.token_id for event in chain(begun, other)] == alone
            check(pair, chat, before, params)


def check(pair: Pair, chat: Chat, before: list[Turn], params: SamplingParams) -> None:
    """The last answer is what the other engine says to the same message in one go."""
    last = chat.turns[-1]
    evict_all(pair.fresh)
    expected = pair.logits(pair.fresh)
    expected.clear()
    fresh = pair.fresh.chat(think_cache=chat.think_cache)
    fresh.turns = copies(before)  # loaded, a marker that the model wrote in mid-answer would become text
    list(fresh.send(last.user, params))
    assert fresh.last is not None
    assert last.answer.token_ids == fresh.last.token_ids
    assert last.answer.text == fresh.last.text
    assert len(expected) >= len(last.answer.token_ids) > 0
    found = pair.logits(pair.used)
    assert [rows for rows, bits in expected.items() if found[rows] != bits] == []
