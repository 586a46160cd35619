"""The keys of a selected message, in a line."""

from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.tool_entry import ToolsEntry


def message_hint(entry: Entry, width: int) -> str:
    """What can be done with this message while it is selected, as far as there is room."""
    hints = _hints(entry)
    text = "Esc back"
    for count in range(1, len(hints) + 1):
        longer = " · ".join([*hints[:count], "Esc back"])
        if len(longer) > width:
            break
        text = longer
    return text


def _hints(entry: Entry) -> list[str]:
    if isinstance(entry, ToolsEntry):
        return ["t results", "c copy", "r retry"]
    hints = ["c copy", "e edit", "r retry"]
    if isinstance(entry, UserEntry | AnswerEntry) and entry.branch[1] > 1:
        hints.append("[ ] branch")
    if isinstance(entry, AnswerEntry):
        code = ["y code", "s save", "x run"] if entry.code(1) is not None else []
        hints += code + ["t thinking"] * entry.has_thought + ["z JSON"] * (entry.tree is not None)
    return hints
