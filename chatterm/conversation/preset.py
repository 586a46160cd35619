"""The settings of a whole conversation, shown at its head: system prompt, sampling and documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatterm.commands.sampling import value_text
from chatterm.conversation.entries import INDENT, Click, Entry, Section
from chatterm.markdown.lines import Line, cells, wrap
from chatterm.terminal.sanitize import cleaned

_HEAD = 3
"""Lines that are shown of a longer system prompt."""


@dataclass(frozen=True, slots=True)
class Preset:
    system: str | None = None
    sampling: tuple[tuple[str, Any], ...] = ()
    """Sampling chosen for this conversation: fields of SamplingParams and their values."""
    documents: tuple[str, ...] = ()
    """Names of the documents at its start."""

    @classmethod
    def of(cls, system: str | None, sampling: Mapping[str, Any], documents: tuple[str, ...] = ()) -> "Preset":
        return cls(system or None, tuple(sampling.items()), documents)

    def __bool__(self) -> bool:
        return self.system is not None or bool(self.sampling or self.documents)

    @property
    def kept(self) -> str:
        """What the next conversation keeps, as a sentence after a space; "" for nothing."""
        parts = ["the system prompt"] if self.system is not None else []
        parts += [f"{name} {value_text(value)}" for name, value in self.sampling]
        listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return f" It keeps {listed}." if parts else ""


NOTHING = Preset()


def preset_lines(preset: Preset, width: int, *, is_open: bool = False) -> tuple[list[Line], int]:
    """Return the lines of a preset, and how many lines of the system prompt they leave out."""
    lines: list[Line] = []
    left = 0
    if preset.system is not None:
        lines, left = _labelled("System prompt", preset.system, width, None if is_open else _HEAD)
        if left:
            lines.append([(f"▸ {left:,} more lines; /system shows all", "fold")])
        elif is_open and len(lines) > _HEAD:
            lines.append([("▾ show less", "fold")])
    if preset.documents:
        lines += _labelled("Library", " · ".join(preset.documents), width, None)[0]
    if preset.sampling:
        values = " · ".join(f"{name} {value_text(value)}" for name, value in preset.sampling)
        lines += _labelled("Sampling", values, width, None)[0]
    return lines, left


def _labelled(label: str, text: str, width: int, most: int | None) -> tuple[list[Line], int]:
    """Return a text with the label before its first line, and how many lines beyond `most` were left out."""
    label += "  "
    rows = cleaned(text).strip("\n").split("\n")
    lines = wrap([(label, "accent"), (rows[0], "muted")], width)
    if cells(label) >= width:
        lines = [[(label.strip(), "accent")], *wrap([(rows[0], "muted")], width)]
    for row in rows[1:]:
        lines += wrap([(row, "muted")], width)
    # A single further line takes no more room than a line that counts it.
    if most is None or len(lines) <= most + 1:
        return lines, 0
    return lines[:most], len(lines) - most


class PresetEntry(Entry):
    """The head of the transcript. A click opens a long system prompt, and closes it."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        self._is_open = False

    def click(self, row: int, column: int) -> Click:
        if any(style == "fold" for number in range(self.height) for _, style in self.line(number)):
            self._is_open = not self._is_open
            self.changed()
            return Click("fold")
        return super().click(row, column)

    def build(self, width: int) -> list[Section]:
        lines, _ = preset_lines(self.preset, width - INDENT, is_open=self._is_open)
        return [Section(lines, [("▏", "rule"), (" ", "")])]
