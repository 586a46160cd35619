"""Draft models on a GPU: an answer is the same with any of them, and a failing one only ends its drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.drafting_in_slots import SlotDrafting
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import CostModel
from models.loading.load import load_model
from models.network import Network
from tests.counting import until
from tests.engine.inside import check_blocks
from tests.engine.speculation import Eager
from tests.gpu.engines import DEVICE, SIZES, an_engine, forget
from tests.gpu.test_speculation import asked, drawn, told
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.hybrids import tiny_qwen3_5

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

LARGE = tiny_qwen3(**SIZES, hidden_size=320, intermediate_size=704, head_dim=128, num_attention_heads=8)
SMALL = tiny_qwen3(
    **{**SIZES, "vocab_size": 288}, hidden_size=256, head_dim=64, num_attention_heads=4, num_hidden_layers=1
)
NETS: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "hidden_size": 256, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
LARGE_NETS = tiny_qwen3_5(**SIZES | NETS)
SMALL_NETS = tiny_qwen3_5(**SIZES | NETS | {"vocab_size": 288, "hidden_size": 128})
KINDS = {
    "plain": (LARGE, SMALL),
    "hybrid": (LARGE_NETS, SMALL_NETS),
    "hybrid draft": (LARGE, SMALL_NETS),
    "hybrid model": (LARGE_NETS, SMALL),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, speculation="draft")
CASES = 10


@pytest.fixture(scope="module", params=list(KINDS))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large and a small model; most layers of either or both may be recurrent."""
    large, small = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small")
    for seed, (folder, config) in enumerate(zip((large, small), KINDS[request.param], strict=True)):
        write_checkpoint(folder, config, dtype=torch.bfloat16, seed=seed)
    return large, small


@contextmanager
def drafted_engine(folders: tuple[Path, Path], name: str, **options: Any) -> Iterator[Engine]:
    """Provide an engine whose draft model is a different model, or a copy of its own."""
    draft: Network = load_model(files_of(folders[name == "random"]), dtype=torch.bfloat16, device=DEVICE)
    options = {"ends": True, "streams": 8, "deterministic": True} | options
    with an_engine(folders[0], drafter=draft, draft_name=name, **options) as engine:
        engine.engine_step.jumps = False  # when an answer jumps depends on the other streams
        yield engine


@pytest.fixture(scope="module", params=["random", "itself"])
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Engine]:
    with drafted_engine(folders, request.param) as engine:
        yield engine


def drafting(engine: Engine) -> SlotDrafting:
    drafts = engine.drafts
    assert isinstance(drafts, SlotDrafting), engine.figures().notes
    return drafts


def draft(engine: Engine, pace: CostModel | None = None) -> Speculating:
    """Have all drafts checked from now on, or as `pace` says."""
    speculating = Speculating(engine.pieces.scheduler, pace or Eager(), drafts=drafting(engine))
    engine.engine_step.speculating = speculating
    return speculating


def test_an_answer_is_the_same_whatever_is_drafted(engine: Engine) -> None:
    """This includes constrained answers."""
    speculating = draft(engine)
    drafted = accepted = 0
    for seed in range(CASES):
        random = Random(seed)
        several = [drawn(random) for _ in range(random.choice([1, 1, 1, 2, 3, 7]))]
        engine.engine_step.speculating = None
        forget(engine)
        plain, events = list[Sequence](), []
        for number, params in enumerate(several):
            plain.append(asked(engine, seed + number, params))
            events.append(list(engine.events(plain[-1])))
        forget(engine)
        engine.engine_step.speculating = speculating
        again = [asked(engine, seed + number, params) for number, params in enumerate(several)]
        for one, sequence, before in zip(events, again, plain, strict=True):
            assert list(engine.events(sequence)) == one, f"seed {seed}"
            assert told(sequence) == told(before), f"seed {seed}"
            drafted, accepted = drafted + sequence.drafted, accepted + sequence.drafts_accepted
        check_blocks(engine)
        engine.loop.call(drafting(engine).blocks.check)
    assert speculating.notes == ()
    assert drafted > 50
    assert accepted > 20 or drafting(engine).name == "random"


def test_a_model_that_is_its_own_draft_is_nearly_always_right(folders: tuple[Path, Path]) -> None:
    rates = {}
    for name in ("itself", "random"):
        with drafted_engine(folders, name, ends=False) as engine:
            for temperature, more in ((0.0, {}), (1.0, {"top_k": 20}), (0.8, {"presence_penalty": 0.5})):
                draft(engine)
                params = SamplingParams(
                    temperature=temperature, seed=3, max_tokens=120, speculation="draft", **more
                )
                list(engine.events(sequence := engine.start(Rows.of([*b"abcabd xyz"]), params)))
                assert sequence.drafted > 20
                rates[name, temperature] = sequence.drafts_accepted / sequence.drafted
    assert min(rate for (name, _), rate in rates.items() if name == "itself") > 0.7, rates
    assert rates["random", 0.0] < 0.5, rates


def test_with_the_engine_s_own_pace_an_answer_is_the_same_too(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, speculation="auto")
    engine.engine_step.speculating = None
    forget(engine)
    events = list(engine.events(asked(engine, 1, params)))
    draft(engine, CostModel(sizes=(1, 2, 4, 8), again=64))
    for _ in range(3):
        forget(engine)
        assert list(engine.events(asked(engine, 1, params))) == events


def test_one_that_fails_ends_its_drafts_and_nothing_else(folders: tuple[Path, Path]) -> None:
    with drafted_engine(folders, "random") as engine:
        assert "draft model random (" in engine.figures().speculation
        assert engine.figures().draft_bytes > 0
        speculating, drafts = draft(engine), drafting(engine)
        chain, chains = drafts.decode_runner.chain, iter(range(100))

        def fails(asked: Any) -> Any:
            if next(chains) == 3:
                raise RuntimeError("out of luck\nand more")
            return chain(asked)

        drafts.decode_runner.chain = fails  # type: ignore[method-assign]
        sequence = engine.start(Rows.of([*b"abc"]), GREEDY)
        found = list(engine.events(sequence))
        assert sequence.drafted > 0
        assert speculating.notes[0].endswith(") is no longer used, because it failed: out of luck.")
        engine.engine_step.speculating = None
        forget(engine)
        assert list(engine.events(engine.start(Rows.of([*b"abc"]), GREEDY))) == found


def test_it_reads_what_was_said_while_nobody_waits(engine: Engine) -> None:
    drafts = drafting(engine)
    draft(engine)
    text = [*b"a text that is read, and which is longer than a block of the cache is "]
    engine.warm_rows(Rows.of(text))
    until(lambda: engine.loop.call(lambda: drafts.blocks.match(text)) == len(text))
    assert engine.loop.call(lambda: drafts.blocks.num_held) == 0
