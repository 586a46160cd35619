"""A one-line hint about the keys of a selected message."""

from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.tool_entry import ToolsEntry


def message_hint(entry: Entry, width: int) -> str:
    """Return the keys for a selected message, as many as fit into `width` columns."""
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
