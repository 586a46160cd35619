"""Commands that ask for answers, stop them, and go from one to another."""

from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError
from chatterm.commands.context import ChatContext
from chatterm.commands.registry import command, screen_command
from chatterm.commands.reports import help_lines, plain_help, undone_text
from chatterm.terminal.sanitize import cleaned, one_line

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat

_MOST = 8
"""The most candidates at once: more cannot be compared."""


@command("/help", "Show commands and keys", {"f1": ""}, ("?",))
def show_help(chat: ChatContext) -> None:
    chat.report("help", "Help", help_lines, plain=plain_help())


@screen_command("/stop", "Stop the answer; its text is kept", {"escape": ""}, ("cancel",))
def stop(chat: "Chat") -> None:
    if chat.stop_answer() or chat.take_back():
        return
    if chat.is_loading:
        chat.worker_thread.abandon()
        chat.hint("Loading is being stopped…", 3.0)
    else:
        chat.say("Nothing is running.")


@screen_command("/continue", "Continue an answer that was stopped", {"alt+g": ""}, ("go",))
def resume(chat: "Chat") -> None:
    chat.need_model()
    if chat.tooling.begin():  # tool calls left unanswered earlier
        return
    chat.conversation.resume()
    chat.transcript.follow()


@screen_command("/answer", "Stop thinking and answer now", {"alt+a": ""})
def answer_now(chat: "Chat") -> None:
    turn = chat.conversation.turn
    if turn is None or not turn.answer.is_thinking:
        raise EngineError("The model is not thinking.")
    if chat.info is not None and chat.info.is_remote:
        raise EngineError(
            "A remote model cannot be told to stop thinking; Esc stops it, /think off turns it off."
        )
    chat.worker_thread.answer_now()
    chat.hint("Thinking stopped; the answer follows.", 2.0)


@screen_command(
    "/retry [N]",
    "Answer again, or N times to choose from; the old answer is kept",
    {"ctrl+r": ""},
    ("regenerate",),
    offers=("2", "3", "4"),
)
def retry(chat: "Chat", count: str) -> None:
    number = _candidate_count(count)
    chat.need_model()
    exchange = chat.exchange()
    if exchange is None:
        raise EngineError("There is no answer to generate again.")
    if chat.conversation.is_busy:
        is_chosen = chat.transcript.selected is not None
        chat.conversation.retry_later(exchange if is_chosen else None, number)
    else:
        chat.conversation.retry(exchange, chat.model_name, number)
    chat.back_to_composer()
    chat.show_candidates()


def _candidate_count(text: str) -> int:
    """Parse the number of answers; "" is 1. Raise EngineError for anything but 1 to `_MOST`."""
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MOST):
        raise EngineError(f"/retry takes a number from 1 to {_MOST}, or nothing; not {one_line(text, 40)!r}.")
    return int(text)


@screen_command(
    "/compare MODEL",
    "Answer again together with another model, side by side, to choose from",
    {"alt+v": None},
)
def compare(chat: "Chat", model: str) -> None:
    chat.need_model()
    exchange = chat.exchange()
    if exchange is None:
        raise EngineError("There is no message to compare answers to; send one first.")
    if model in (chat.model_name, chat.backend.model):
        raise EngineError("That is the current model; /retry 2 has it answer twice.")
    chat.conversation.compare(exchange, chat.model_name, one_line(model, 300))
    chat.back_to_composer()
    chat.show_candidates()


@screen_command("/edit [N]", "Edit message N (default: the last)", {"alt+e": ""})
def edit(chat: "Chat", which: str) -> None:
    exchange = chat.exchange(which)
    if exchange is None:
        raise EngineError("There is no message to edit yet.")
    chat.writing.begin_edit(chat.conversation.tree.asked(exchange))


@screen_command("/branch [prev|next]", "Switch to another branch", {"alt+left": "prev", "alt+right": "next"})
def branch(chat: "Chat", where: str) -> None:
    entry = chat.transcript.selected
    if not where:
        undone = undone_text(len(chat.conversation.undone))
        chat.say(
            "/branch prev and /branch next (Alt+Left, Alt+Right) switch between the alternatives."
            + (f"\n{undone}" if undone else "")
        )
        return
    there = chat.conversation.step(entry, -1 if where == "prev" else 1)
    if there is None:
        raise EngineError(
            "There is no other branch here; /retry and /edit create one."
            if entry is None
            else "This message has no alternatives; retry and edit create one."
        )
    if entry is not None:
        chat.transcript.select(there)


@screen_command("/undo", "Undo the last message", {"alt+u": ""})
def undo(chat: "Chat") -> None:
    if chat.editing is not None:  # the undone message would be mixed into the edit
        raise EngineError("A message is being edited; Enter sends it anew, Esc leaves it unchanged.")
    if not chat.conversation.take_back_last():
        chat.say("There is nothing to undo.")


@screen_command("/redo", "Restore the message that /undo removed", {"alt+z": ""})
def redo(chat: "Chat") -> None:
    text = chat.conversation.redo("There is nothing to redo; /branch shows other versions of a message.")
    chat.composer.take_away(cleaned(text))
    chat.transcript.follow()
