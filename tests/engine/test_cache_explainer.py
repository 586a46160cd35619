"""What a prompt cost and why: the counts are those of the network, and it parts where it is said to."""

from pathlib import Path

import pytest

from engine import SamplingParams
from engine.conversation.chat import Chat
from engine.events import Cause, Parting, TurnStats
from tests.engine.inside import evict_all
from tests.engine.tiny import TinyEngine, say, tiny_engine, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
NEW_MESSAGE = "<|im_end|>\n<|im_start|>user\n"
ASKED = "<|im_end|>\n<|im_start|>assistant\n"


def ask(engine: TinyEngine, chat: Chat, text: str, thought: str | None, answer: str) -> TurnStats:
    """One turn with a scripted answer. Its figures, compared with what the network has computed."""
    engine.scripted.script = say(engine, thought, answer)
    before = engine.scripted.rows_computed
    list(chat.send(text, GREEDY))
    assert chat.last is not None
    stats = chat.last.stats
    assert stats.reused_tokens + stats.warmed_tokens + stats.prefilled_tokens == stats.prompt_tokens
    assert min(stats.reused_tokens, stats.warmed_tokens, stats.prefilled_tokens) >= 0
    # The last token that is drawn is not computed before somebody needs it (mask does at once).
    computed = engine.scripted.rows_computed - before - (len(chat.last.token_ids) - 1)
    if chat.think_cache == "exact":
        assert stats.prefilled_tokens == computed
    assert TurnStats.of(stats.to_dict()) == stats
    return stats


def count(engine: TinyEngine, text: str) -> int:
    return len(engine.tokenizer.encode(text))


def token(engine: TinyEngine, text: str) -> int:
    return engine.tokenizer.encode(text)[0]


def test_the_first_turn_computes_everything_and_nothing_parts(engine: TinyEngine) -> None:
    stats = ask(engine, engine.chat(system="Be brief."), "one", "hm", "first")
    assert (stats.reused_tokens, stats.warmed_tokens) == (0, 0)
    assert stats.parting is stats.draft_parting is None


@pytest.mark.parametrize("settled", [True, False])
def test_thinking_is_where_the_next_prompt_parts(engine: TinyEngine, settled: bool) -> None:
    chat = engine.chat(system="Be brief.")
    first = ask(engine, chat, "one", "hm", "first")
    if settled:
        chat.settle(wait=True)
    stats = ask(engine, chat, "two", "hm", "second")
    assert stats.reused_tokens == first.prompt_tokens
    assert stats.warmed_tokens == (count(engine, "first" + NEW_MESSAGE) if settled else 0)
    assert stats.parting == Parting(
        first.prompt_tokens, 1, True, token(engine, "<think>"), token(engine, "f"), Cause.THINKING
    )
    chat.settle(wait=True)
    third = ask(engine, chat, "three", "hm", "third")
    assert third.reused_tokens == stats.prompt_tokens, "what was warmed in an earlier pause is reused"
    assert third.parting is not None
    assert (third.parting.message, third.parting.cause) == (2, Cause.THINKING)


def test_without_thinking_nothing_parts(engine: TinyEngine) -> None:
    chat = engine.chat()
    first = ask(engine, chat, "one", None, "first")
    stats = ask(engine, chat, "two", None, "second")
    assert stats.reused_tokens == first.prompt_tokens + count(engine, "first")
    assert stats.parting is None


def test_an_empty_think_span_of_the_prompt_is_thinking_too(engine: TinyEngine) -> None:
    chat = engine.chat(think="off")
    ask(engine, chat, "one", None, "first")
    parting = ask(engine, chat, "two", None, "second").parting
    assert parting is not None
    assert (parting.cause, parting.cached) == (Cause.THINKING, token(engine, "<think>"))


@pytest.mark.parametrize("drawn", [True, False], ids=["first token drawn", "only warmed"])
def test_a_pasted_draft_leaves_nothing_or_the_glue(engine: TinyEngine, drawn: bool) -> None:
    chat = engine.chat()
    first = ask(engine, chat, "one", None, "first")
    pasted = "a long text " * 8
    engine.scripted.script = say(engine, None, "second")[:1] if drawn else []
    chat.prepare(pasted, wait=True, params=GREEDY if drawn else None)
    engine.scripted.script = say(engine, None, "second")[drawn:]
    list(chat.send(pasted, GREEDY))
    assert chat.last is not None
    stats = chat.last.stats
    assert stats.reused_tokens == first.prompt_tokens + count(engine, "first")
    assert stats.prefilled_tokens == (0 if drawn else count(engine, ASKED))
    assert stats.reused_tokens + stats.warmed_tokens + stats.prefilled_tokens == stats.prompt_tokens
    assert stats.parting is stats.draft_parting is None


@pytest.mark.parametrize("params", [GREEDY, None], ids=["first token drawn", "only warmed"])
def test_a_draft_that_is_changed_in_the_middle(engine: TinyEngine, params: SamplingParams | None) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", None, "first")
    chat.prepare("what about the red one of them", wait=True, params=params)
    stats = ask(engine, chat, "what about the blue one of them", None, "second")
    assert stats.draft_parting is not None
    assert stats.draft_parting == Parting(
        stats.cached_tokens, 2, False, token(engine, "r"), token(engine, "b"), Cause.DRAFT
    )
    assert stats.prefilled_tokens == count(engine, "blue one of them" + ASKED)
    assert stats.parting is None


def test_a_draft_that_only_went_on_was_not_changed(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", None, "first")
    for draft in ("wh", "what abo", "what a", "what about"):
        chat.prepare(draft, wait=True, params=GREEDY)
    stats = ask(engine, chat, "what about it", None, "second")
    assert stats.draft_parting is None
    assert stats.prefilled_tokens == count(engine, " it" + ASKED)


def test_retry_computes_one_row_and_an_edit_its_message(engine: TinyEngine) -> None:
    chat = engine.chat()
    for text in ("one", "two", "three"):
        ask(engine, chat, text, None, f"answer to {text}")
    engine.scripted.script = say(engine, None, "another")
    list(chat.retry(GREEDY))
    assert chat.last is not None
    assert (chat.last.stats.prefilled_tokens, chat.last.stats.warmed_tokens) == (1, 0)
    assert chat.last.stats.parting is None
    old = chat.turns
    chat.load(old[:1])
    stats = ask(engine, chat, "tea?", None, "yes")
    assert stats.parting == Parting(
        stats.reused_tokens, 2, False, token(engine, "w"), token(engine, "e"), Cause.EDITED
    )
    assert stats.prefilled_tokens == count(engine, "ea?" + ASKED)
    chat.load(old)
    stats = ask(engine, chat, "four", None, "4")
    assert stats.prefilled_tokens == count(engine, NEW_MESSAGE + "four" + ASKED), (
        "the old branch is all there"
    )
    assert stats.parting is None


def test_another_system_prompt(engine: TinyEngine) -> None:
    chat = engine.chat(system="Be brief.")
    ask(engine, chat, "one", None, "first")
    chat.system = "Be long."
    stats = ask(engine, chat, "two", None, "second")
    same = count(engine, "<|im_start|>system\nBe ")
    assert stats.parting == Parting(same, 0, False, token(engine, "b"), token(engine, "l"), Cause.SYSTEM)
    assert stats.reused_tokens == same


def test_an_evicted_cache(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", "hm", "first")
    chat.settle(wait=True)
    engine.evict_all()
    stats = ask(engine, chat, "two", None, "second")
    assert (stats.reused_tokens, stats.warmed_tokens) == (0, 0)
    assert stats.parting is not None
    assert (stats.parting.row, stats.parting.cached, stats.parting.cause) == (0, -1, Cause.EVICTED)


def test_what_was_drawn_and_then_evicted_counts_as_computed(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", None, "first")
    chat.prepare("two", wait=True, params=GREEDY)
    engine.evict_all()
    before = engine.scripted.rows_computed
    list(chat.send("two", GREEDY))
    assert chat.last is not None
    stats = chat.last.stats
    assert (stats.cached_tokens, stats.warmed_tokens) == (0, 0)
    assert stats.prefilled_tokens == stats.prompt_tokens
    assert stats.prefilled_tokens == engine.scripted.rows_computed - before - (len(chat.last.token_ids) - 1)


def test_a_session_that_was_opened(engine: TinyEngine) -> None:
    other = engine.chat()
    for text in ("one", "two"):
        ask(engine, other, text, "hm", f"answer to {text}")
    turns = other.turns
    engine.evict_all()
    chat = engine.chat()
    chat.load(turns)
    chat.settle(wait=True)
    stats = ask(engine, chat, "three", None, "third")
    assert stats.parting is not None
    assert (stats.parting.row, stats.parting.cached, stats.parting.cause) == (0, -1, Cause.OPENED)
    assert stats.reused_tokens == 0
    assert stats.prefilled_tokens == count(engine, "three" + ASKED)


def test_a_masked_answer_is_reused_as_it_is(engine: TinyEngine) -> None:
    chat = engine.chat(think_cache="mask")
    first = ask(engine, chat, "one", "hm", "first")
    stats = ask(engine, chat, "two", "hm", "second")
    assert stats.reused_tokens == first.prompt_tokens + count(engine, "first<|im_end|>")
    assert stats.prefilled_tokens == count(engine, "\n<|im_start|>user\ntwo" + ASKED)
    assert stats.parting is None


@pytest.mark.parametrize("in_idle_time", [True, False])
def test_masked_answers_that_are_computed_again_are_counted(engine: TinyEngine, in_idle_time: bool) -> None:
    chat = engine.chat(think_cache="mask")
    for text in ("one", "two"):
        ask(engine, chat, text, "hm", f"answer to {text}")
    engine.evict_all()
    if in_idle_time:
        chat.settle(wait=True)
    stats = ask(engine, chat, "three", "hm", "third")
    new = count(engine, "three" + ASKED)
    assert stats.reused_tokens == 0
    assert stats.prefilled_tokens == (new if in_idle_time else stats.prompt_tokens)
    assert stats.parting is not None
    assert stats.parting.cause is Cause.EVICTED


def test_from_mask_to_exact(engine: TinyEngine) -> None:
    chat = engine.chat(think_cache="mask")
    first = ask(engine, chat, "one", "hm", "first")
    chat.think_cache = "exact"
    chat.settle(wait=True)
    stats = ask(engine, chat, "two", "hm", "second")
    assert stats.parting is not None
    assert (stats.parting.row, stats.parting.cause) == (first.prompt_tokens, Cause.POLICY)
    assert stats.prefilled_tokens == count(engine, "two" + ASKED)


def test_from_exact_to_mask(engine: TinyEngine) -> None:
    chat = engine.chat()
    first = ask(engine, chat, "one", "hm", "first")
    chat.think_cache = "mask"
    stats = ask(engine, chat, "two", "hm", "second")
    assert stats.reused_tokens == first.prompt_tokens + count(engine, "first"), (
        "its rows moved up as they are"
    )
    assert stats.parting is None
    chat.think_cache = "exact"
    ask(engine, chat, "three", "hm", "third")
    chat.think_cache = "mask"
    chat.settle(wait=True)
    stats = ask(engine, chat, "four", "hm", "fourth")
    assert stats.parting is not None
    assert (stats.parting.message, stats.parting.cause) == (3, Cause.POLICY)


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_an_answer_that_was_cut_short_is_followed_by_what_is_new(
    engine: TinyEngine, think_cache: str
) -> None:
    chat = engine.chat(think_cache=think_cache)  # type: ignore[arg-type]
    engine.scripted.script = say(engine, None, "a long answer")
    list(chat.send("one", SamplingParams(temperature=0.0, max_tokens=5)))
    stats = ask(engine, chat, "two", None, "second")
    assert stats.parting is None
    assert stats.prefilled_tokens == count(engine, "n" + NEW_MESSAGE + "two" + ASKED)


def test_another_answer_on_a_branch_that_was_evicted_from_its_end(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", None, "an apple")
    old = chat.turns
    engine.scripted.script = say(engine, None, "an orange")
    list(chat.retry(GREEDY))
    keys = chat.history.keys
    evict_all(engine)
    engine.warm(list(keys))  # type: ignore[arg-type]
    chat.load(old)
    parting = ask(engine, chat, "two", None, "second").parting
    assert parting is not None
    assert (parting.message, parting.in_answer, parting.cause) == (1, True, Cause.BRANCH)
    assert (parting.cached, parting.wanted) == (token(engine, "o"), token(engine, "a"))


def test_the_end_of_an_answer_that_the_template_trims(tmp_path: Path) -> None:
    from tests.engine.tiny import TEMPLATE

    template = TEMPLATE.replace("lstrip('\\n') %}", "strip() %}")
    assert template != TEMPLATE
    with tiny_engine(tmp_path, tokenizer=tiny_tokenizer(template)) as engine:
        chat = engine.chat()
        first = ask(engine, chat, "one", None, "first \n")
        stats = ask(engine, chat, "two", None, "second")
        assert stats.parting == Parting(
            first.prompt_tokens + count(engine, "first"),
            1,
            True,
            token(engine, " "),
            token(engine, "<|im_end|>"),
            Cause.TRIMMED,
        )


def test_an_answer_that_goes_on_keeps_its_reasons(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", "hm", "first")
    engine.scripted.script = say(engine, "hm", "second")
    list(chat.send("two", SamplingParams(temperature=0.0, max_tokens=6)))
    list(chat.resume(GREEDY))
    assert chat.last is not None
    stats = chat.last.stats
    assert stats.parting is None, "the figures are those of what was added"
    assert stats.prefilled_tokens <= 1
    assert ask(engine, chat, "three", None, "third").parting is not None


def test_strange_numbers_are_no_parting() -> None:
    known = Parting(5, 1, True, 2, 3, Cause.THINKING).to_dict("parting_")
    assert TurnStats.of(known).parting is not None
    for name, value in (("parting_cause", 99), ("parting_row", "x"), ("parting_wanted", None)):
        assert TurnStats.of({**known, name: value}).parting is None
    assert TurnStats.of({}) == TurnStats()
    assert repr(TurnStats.of({"prompt_tokens": 7.0, "ttft_s": 1})) == repr(TurnStats(7, ttft_s=1.0))
