"""Vim's keys for a text: how a key changes text and cursor, independent of any widget.

A place is an offset in characters from the start. In normal mode the cursor is on a character; `u` goes back one
change at a time.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

Mode = Literal["insert", "normal", "visual", "lines"]

_MOST = 999
"""The largest count."""
_STATES = 200
"""The most changes that `u` can undo."""
_WORD = re.compile(r"\w+|[^\w\s]+|(?<=\n)(?=\n)")
_LONGEST = 100_000
"""Characters of a text from which a count adds nothing more."""


@dataclass(frozen=True, slots=True)
class VimText:
    text: str
    at: int


@dataclass(slots=True)
class Vim:
    """The vim state of one composer. `press` returns whether it used the key; `now` is the result."""

    now: VimText = field(default_factory=lambda: VimText("", 0))
    mode: Mode = "insert"
    start: int = 0
    """The place where the selection began."""
    _keys: str = ""
    """The keys of an incomplete command."""
    _kept: str = ""
    _kept_lines: bool = False
    """The text deleted or yanked last, and whether it was whole lines."""
    _before: list[VimText] = field(default_factory=list)
    _after: list[VimText] = field(default_factory=list)
    _repeat: str = ""
    """The keys of the last change, for `.`."""
    _repeat_typed: str = ""
    """The text typed in that change."""
    _entered: str = ""
    """The keys that began insert mode."""
    _typed_from: VimText | None = field(default_factory=lambda: VimText("", 0))
    """The state in which insert mode began; None outside insert mode."""

    def take(self, text: str, at: int) -> None:
        """Take over the composer's text and cursor before a key: they may have changed since the last one."""
        if self.mode != "insert" and text != self.now.text:
            self._keep_state()
        self.now = VimText(text, min(max(at, 0), len(text)))
        if self.mode != "insert":
            self.now = replace(self.now, at=self._on(self.now.at))

    @property
    def selection(self) -> tuple[int, int] | None:
        """The start and end of the selection; None outside visual mode."""
        if self.mode not in ("visual", "lines"):
            return None
        first, last = sorted((self.start, self.now.at))
        if self.mode == "lines":
            return self._line(first)[0], min(self._line(last)[1] + 1, len(self.now.text))
        return first, min(last + 1, len(self.now.text))

    @property
    def pending(self) -> str:
        return self._keys

    def press(self, key: str) -> bool:
        """Handle `key`: a character, "escape" or "ctrl+r". Return False if it is left to the composer."""
        if self.mode == "insert":
            if key != "escape":
                return False
            self._leave_insert()
            return True
        if key == "escape":
            was_idle = not self._keys and self.mode == "normal"
            self._keys, self.mode = "", "normal"
            return not was_idle
        if key == "ctrl+r":
            self._keys = ""
            self._step(self._after, self._before)
            return True
        if len(key) != 1:
            return False
        if self.selection is not None and not self._keys and key in "dcyx":
            self.use_selection("d" if key == "x" else key)
            return True
        self._keys += key
        match = re.fullmatch(r"([1-9]\d*)?([dcy])?([1-9]\d*)?(.*)", self._keys, re.DOTALL)
        assert match is not None
        counts = [min(int(number[:4]), _MOST) for number in (match[1], match[3]) if number]
        count = min(counts[0] * counts[-1] if len(counts) > 1 else sum(counts), _MOST)
        if match[4] and not (match[4] in ("g", "f", "t", "F", "T") or (match[4] == "r" and not match[2])):
            keys, self._keys = self._keys, ""
            self._do(match[2] or "", count, match[4], keys)
        return True

    # --- commands ---

    def _do(self, operator: str, count: int, what: str, keys: str) -> None:
        times = count or 1
        if self.selection is not None:
            return self._do_selected(times, what)
        if operator:
            return self._operate(operator, times, count, what, keys)
        place = self._place(what, times, count, moving=True)
        if place is not None:
            self.now = replace(self.now, at=self._on(place))
            return None
        text, at = self.now.text, self.now.at
        first, end = self._line(at)
        match what:
            case "i" | "a" | "I" | "A":
                self._insert({"i": at, "a": min(at + 1, end), "I": self._indent(first), "A": end}[what], keys)
            case "o" | "O":
                place = end if what == "o" else first
                self._change(text[:place] + "\n" + text[place:], "")
                self._insert(end + 1 if what == "o" else first, keys)
            case "x" if first < end:
                self._cut(at, min(at + times, end), keys)
            case "D" | "C" if first < end or what == "C":
                self._cut(at, end, keys)
                if what == "C":
                    self._insert(at, keys)
            case "Y":
                self._operate("y", times, count, "y", keys)
            case "p" | "P" if self._kept:
                self._put(times, what == "p", keys)
            case "u":
                for _ in range(times):
                    self._step(self._before, self._after)
            case "v" | "V":
                self.mode, self.start = "visual" if what == "v" else "lines", at
            case "." if self._repeat:
                was, before = self.now, self._before
                for _ in range(times):
                    self._again()
                    if len(self.now.text) >= _LONGEST:
                        break
                if self._before is not before:
                    self._before = [*before, was][-_STATES:]  # undone as one change
            case _ if what[0] == "r" and len(what) == 2 and at + times <= end:
                self._change(text[:at] + what[1] * times + text[at + times :], keys, at + times - 1)
        return None

    def _do_selected(self, times: int, what: str) -> None:
        place = self._place(what, times, times, moving=True)
        if place is not None:
            self.now = replace(self.now, at=self._on(place))
        elif what in ("v", "V"):
            wanted: Mode = "visual" if what == "v" else "lines"
            self.mode = "normal" if self.mode == wanted else wanted
        elif what == "o":
            self.start, self.now = self.now.at, replace(self.now, at=self.start)

    def use_selection(self, operator: str) -> None:
        """Delete, change or yank the selection."""
        if (selected := self.selection) is None:
            return
        first, last = selected
        lines = self.mode == "lines"
        self.mode = "normal"
        self._apply(operator, first, last, lines, "")

    def _operate(self, operator: str, times: int, count: int, what: str, keys: str) -> None:
        text, at = self.now.text, self.now.at
        first, end = self._line(at)
        if what == operator:
            last = first
            for _ in range(times):
                last = min(self._line(last)[1] + 1, len(text)) if last < len(text) or last == first else last
            return self._apply(operator, first, max(last, end), True, keys)
        if operator == "c" and what == "w" and at < end and not text[at].isspace():
            what = "e"
        place = self._place(what, times, count, moving=False)
        if place is None:
            return None
        if what in ("j", "k", "G", "gg"):
            low, high = sorted((at, min(place, len(text))))
            return self._apply(
                operator, self._line(low)[0], min(self._line(high)[1] + 1, len(text)), True, keys
            )
        if what[0] in "eft$" and place > at:
            place = min(place + (what[0] != "$"), len(text))
        if what == "w" and "\n" in text[at:place] and at < end:
            place = min(place, max(end, at))
        low, high = sorted((at, place))
        return self._apply(operator, low, high, False, keys)

    def _apply(self, operator: str, first: int, last: int, lines: bool, keys: str) -> None:
        """Apply an operator to the text from `first` to `last`, which is whole lines if `lines`."""
        text = self.now.text
        self._kept, self._kept_lines = text[first:last], lines
        if lines and not self._kept.endswith("\n"):
            self._kept += "\n"
        if operator == "y":
            self.now = replace(self.now, at=self._on(first))
        elif operator == "c":
            end = last - 1 if lines and text[first:last].endswith("\n") else last
            self._change(text[:first] + text[end:], keys, first)
            self._insert(first, keys)
        else:
            if lines and last == len(text) and first and not text[first:last].endswith("\n"):
                first -= 1  # the last line is deleted with the line break before it
            left = text[:first] + text[last:]
            self._change(left, keys, self._line(min(first, len(left)), left)[0] if lines else first)

    def _cut(self, first: int, last: int, keys: str) -> None:
        self._kept, self._kept_lines = self.now.text[first:last], False
        self._change(self.now.text[:first] + self.now.text[last:], keys, first)

    def _put(self, times: int, after: bool, keys: str) -> None:
        text, at = self.now.text, self.now.at
        first, end = self._line(at)
        kept = self._kept * min(times, max((_LONGEST - len(text)) // len(self._kept), 1))
        if self._kept_lines and after:
            put = "\n" + kept.removesuffix("\n")
            self._change(text[:end] + put + text[end:], keys, end + 1)
        elif self._kept_lines:
            self._change(text[:first] + kept + text[first:], keys, first)
        else:
            place = min(at + 1, end) if after else at
            self._change(text[:place] + kept + text[place:], keys, place + len(kept) - 1)

    # --- states ---

    def _change(self, text: str, keys: str, at: int | None = None) -> None:
        if text != self.now.text:
            self._keep_state()
        if keys:
            self._repeat, self._repeat_typed = keys, ""
        self.now = VimText(text, self.now.at if at is None else at)
        self.now = replace(self.now, at=self._on(min(self.now.at, len(text))))

    def _keep_state(self) -> None:
        """Save the present state for undo."""
        self._before = [*self._before, self.now][-_STATES:]
        self._after = []

    def _insert(self, at: int, keys: str) -> None:
        self.mode = "insert"
        self.now = replace(self.now, at=min(max(at, 0), len(self.now.text)))
        self._typed_from, self._entered = self.now, keys

    def _again(self) -> None:
        """Repeat the last change with the text typed in it."""
        keys, typed = self._repeat, self._repeat_typed
        for key in keys:
            self.press(key)
        if self.mode == "insert":
            text, at = self.now.text, self.now.at
            self.now = VimText(text[:at] + typed + text[at:], at + len(typed))
            self._leave_insert()
        self._repeat, self._repeat_typed = keys, typed

    def _leave_insert(self) -> None:
        self.mode = "normal"
        before, self._typed_from = self._typed_from, None
        if before is not None and before.text != self.now.text:
            self._before = [*self._before, before][-_STATES:]
            self._after = []
        if before is not None and self._entered:
            self._repeat, self._repeat_typed = self._entered, self.now.text[before.at : self.now.at]
        first, _ = self._line(self.now.at)
        self.now = replace(self.now, at=self._on(max(self.now.at - 1, first)))

    def _step(self, there: list[VimText], back: list[VimText]) -> None:
        if there:
            back.append(self.now)
            self.now = there.pop()
            self.now = replace(self.now, at=self._on(min(self.now.at, len(self.now.text))))

    # --- places ---

    def _line(self, at: int, text: str | None = None) -> tuple[int, int]:
        """Return the start and end of the line at `at`."""
        text = self.now.text if text is None else text
        end = text.find("\n", at)
        return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end

    def _on(self, at: int) -> int:
        """Return the nearest place allowed for the cursor."""
        if self.mode == "insert":
            return at
        first, end = self._line(at)
        return max(min(at, end - 1), first)

    def _indent(self, first: int) -> int:
        end = self._line(first)[1]
        line = self.now.text[first:end]
        return first + len(line) - len(line.lstrip())

    def _place(self, what: str, times: int, count: int, *, moving: bool) -> int | None:
        """Return the target of a motion; None if it is no motion or has no target."""
        text, at = self.now.text, self.now.at
        first, end = self._line(at)
        match what:
            case "h" | "l":
                return max(at - times, first) if what == "h" else min(at + times, end)
            case "0" | "^" | "$":
                return {"0": first, "^": self._indent(first), "$": end}[what]
            case "j" | "k":
                column, place = at - first, at
                for _ in range(times):
                    low, high = self._line(place)
                    if (what == "j" and high == len(text)) or (what == "k" and not low):
                        break
                    low, high = self._line(high + 1 if what == "j" else low - 1)
                    place = min(low + column, high)
                return place if moving or self._line(place) != (first, end) else None
            case "gg" | "G":
                lines = text.split("\n")
                number = min(count, len(lines)) if count else (1 if what == "gg" else len(lines))
                return sum(len(line) + 1 for line in lines[: number - 1])
            case "w" | "b" | "e":
                return self._word(what, times)
            case _ if what[0] in "ftFT" and len(what) == 2:
                return self._found(what[0], what[1], times)
        return None

    def _word(self, what: str, times: int) -> int:
        text, at = self.now.text, self.now.at
        words = [match.span() for match in _WORD.finditer(text)]
        if what == "b":
            places = [first for first, _ in words if first < at][::-1]
        elif what == "w":
            places = [first for first, _ in words if first > at]
        else:
            places = [last - 1 for first, last in words if last - 1 > at and last > first]
        if len(places) >= times:
            return places[times - 1]
        return 0 if what == "b" else len(text) if what == "w" else max(len(text) - 1, 0)

    def _found(self, how: str, character: str, times: int) -> int | None:
        """Return the target of f, t, F or T in the line; None if the character does not occur `times` times."""
        text, at = self.now.text, self.now.at
        first, end = self._line(at)
        if how in "ft":
            places = [n for n in range(at + 1, end) if text[n] == character]
        else:
            places = [n for n in range(first, at) if text[n] == character][::-1]
        if len(places) < times:
            return None
        return places[times - 1] + {"t": -1, "T": 1}.get(how, 0)
