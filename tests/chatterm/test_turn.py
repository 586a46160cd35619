"""One answer on the screen while it comes."""

import pytest

from chatterm.backends.backend import Exchange, Outcome, TokenEvent, TurnStats
from chatterm.backends.worker import Token
from chatterm.conversation.entries import UserEntry
from chatterm.conversation.session_tree import SessionTree
from chatterm.conversation.turn import RunningTurn, finished_answer_entry
from chatterm.markdown.document import Document


@pytest.mark.parametrize("thinking", [False, True])
def test_what_was_shown_of_an_answer_that_goes_on_is_neither_lost_nor_doubled(thinking: bool) -> None:
    """Half a character stood at its end, or what has become part of a longer piece."""
    for shown, before, piece in (
        ("caf\ufffd", "caf", "\u00e9"),
        ("a ST", "a ", "STx"),
        ("same", "same", " more"),
    ):
        said = ("", shown) if thinking else (shown, "hm")
        exchange = Exchange(1, None, "q", text=said[0], reasoning=said[1], token_ids=[1, 2], thinking_s=3.0)
        exchange.stats = {"generated_tokens": 2.0, "reasoning_tokens": 2.0, "decode_s": 1.0}
        entry = finished_answer_entry(exchange, show_thinking=None)
        turn = RunningTurn(SessionTree(None), exchange, UserEntry("q"), entry, 0.0, is_resumed=True)
        outcome = Outcome("", before, None, TurnStats(), [1, 2], seed=5, ends_at=9)
        if not thinking:
            outcome = Outcome(before, "hm", None, TurnStats(), [1, 2], seed=5, ends_at=9)
        turn.begin(outcome)
        kind = "reasoning" if thinking else "answer"
        latest = Outcome("", "", None, TurnStats(generated_tokens=4, decode_s=0.5), [1, 2, 3, 4])
        turn.take([Token(0.0, TokenEvent(piece, 3, kind))], latest)  # type: ignore[arg-type]
        whole = before + piece
        assert (exchange.reasoning if thinking else exchange.text) == whole
        document = entry.thinking if thinking else entry.body
        assert document.lines(40) == Document(whole).lines(40)
        assert (exchange.token_ids, exchange.seed, exchange.thinking_s) == ([1, 2, 3], 5, 3.0)
        assert exchange.stats["generated_tokens"] == 3
        assert exchange.stats["decode_s"] == 1.5
