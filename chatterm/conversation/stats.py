"""/stats: this turn, this session and this process side by side, and the state of the engine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chatterm.backends.backend import DiskFigures, Figures, ModelInfo, OffloadFigures, TurnStats
from chatterm.conversation.figures import (
    SessionStats,
    decode_rate,
    guesses_text,
    has_gained,
    rate_text,
    seconds_text,
    tokens_a_step,
    weights_text,
)
from chatterm.markdown.lines import Line, cells, longest_word, wrap
from chatterm.markdown.table import table_lines
from models.units import bytes_text, counted

_NONE = "–"


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Resources that this process has used so far."""

    since_s: float
    """Seconds since it began."""
    cpu_s: float
    """CPU seconds of all its threads."""
    peak_bytes: int | None
    """Peak memory; None if the system does not report it."""


def process_figures(begun: float) -> ProcessFigures:
    """Measure this process; `begun` is its start by `time.monotonic()`."""
    peak: int | None = None
    try:
        import resource
        import sys
    except ImportError:  # Windows
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return ProcessFigures(time.monotonic() - begun, time.process_time(), peak)


def stats_lines(
    width: int,
    turn: TurnStats | None,
    session: SessionStats,
    info: ModelInfo | None,
    figures: Figures | None,
    process: SessionStats | None = None,
    machine: ProcessFigures | None = None,
) -> list[Line]:
    """Return tables for `width` columns. `process` sums up the turns of all sessions since the program began."""
    lines: list[Line] = []
    if turn is None and not session.turns and not (process and process.turns):
        lines.append([("There are no answers yet.", "muted")])
    else:
        columns = [("this session", session)]
        if process is not None and process != session:
            columns.append(("since start", process))
        lines += _turn_table(turn, columns, width)
        lines += _reuse(columns[-1][1], width)
    about = _about(info, figures, machine)
    if about:
        lines += [[], *_pairs(about, width)]
    return lines


def _turn_table(turn: TurnStats | None, columns: list[tuple[str, SessionStats]], width: int) -> list[Line]:
    def count(name: str) -> list[str]:
        return [f"{getattr(turn, name):,}" if turn else _NONE, *(f"{getattr(s, name):,}" for _, s in columns)]

    def prompt(name: str, known: str = "split_tokens") -> list[str]:
        told = [
            turn,
            *(s for _, s in columns),
        ]  # unknown if a server does not report it, or an answer was cut off
        return [
            text if of and getattr(of, known) else _NONE for text, of in zip(count(name), told, strict=True)
        ]

    def each(of_turn: Callable[[TurnStats], str], of_session: Callable[[SessionStats], str]) -> list[str]:
        return [of_turn(turn) if turn else _NONE, *(of_session(s) for _, s in columns)]

    rows = [
        ["", "last answer", *(title for title, _ in columns)],
        ["answers", _NONE, *(f"{s.turns:,}" for _, s in columns)],
        ["prompt tokens", *prompt("prompt_tokens", "prompt_tokens")],
        ["  from cache", *prompt("cached_tokens")],
        ["  computed", *prompt("prefilled_tokens")],
        ["  cache hit rate", *each(_cached_share, _cached_share)],
        ["generated tokens", *count("generated_tokens")],
        ["  thinking", *count("reasoning_tokens")],
        ["first token (mean)", *each(lambda t: seconds_text(t.ttft_s) if t.ttft_s else _NONE, _mean_ttft)],
        ["prefill", *each(lambda t: _rate(t.prefill_tokens_per_s), _prefill)],
        ["decode", *each(_decode, _decode)],
        ["decode time", *each(_decode_time, _decode_time)],
    ]
    if any(has_gained(s) for _, s in columns):
        rows.append(["guessed right", *each(_guessed, _guessed)])
        if any(s.drafted_tokens for _, s in columns):
            rows.append(["  from the text", *each(_repeated, _repeated)])
            rows.append(["  draft model", *each(_drafted, _drafted)])
        rows.append(["  tokens a step", *each(_a_step, _a_step)])
        rows.append(["  time saved", *each(_saved, _saved)])
    if any(s.retries for _, s in columns):
        rows.append(["retries", _NONE, *(f"{s.retries:,}" for _, s in columns)])
        rows.append(["  tokens reused", _NONE, *(f"{s.reused_tokens:,}" for _, s in columns)])
        rows.append(["  tokens computed", _NONE, *(_computed_again(s) for _, s in columns)])
    lines: list[Line] = []
    for group in _side_by_side(rows, width):
        runs = [[[(cell, "")] for cell in row] for row in group]
        lines += ([[]] if lines else []) + table_lines(runs, ["left", *["right"] * len(group[0])], width)
    return lines


def _side_by_side(rows: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Yield the table in as many parts as it takes for no cell to wrap: each has the first column, and as many of the
    others as fit.
    """
    sizes = [max(cells(row[column]) for row in rows) + 3 for column in range(len(rows[0]))]
    first, room = 1, width - sizes[0] + 3
    for last in range(1, len(sizes)):
        if last + 1 == len(sizes) or sum(sizes[first : last + 2]) > room:
            part = [[row[0], *row[first : last + 1]] for row in rows]
            yield part if len(part[0]) == len(rows[0]) else [row for row in part if set(row[1:]) != {_NONE}]
            first = last + 1


def _reuse(stats: SessionStats, width: int) -> list[Line]:
    """Say how much of the prompts was in the cache: counted, never estimated."""
    if not stats.cached_tokens:
        return []
    text = f"{stats.cached_tokens:,} of {counted(stats.split_tokens, 'prompt token')} came from the cache"
    if stats.warmed_tokens:
        text += f", {stats.warmed_tokens:,} of them prewarmed while you read and typed"
    if stats.retries:
        share = _share(stats.reused_tokens, stats.retried_tokens)
        text += f". Retries found {share} of their prompts in the cache"
    return [[], *wrap([(text + ".", "accent")], width)]


def _about(
    info: ModelInfo | None, figures: Figures | None, machine: ProcessFigures | None
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    if info is not None:
        pairs.append(("model", f"{info.label} · {info.where}"))
        if info.context_length:
            pairs.append(("context", counted(info.context_length, "token")))
    if figures is not None:
        pairs.append(("kernels", f"{figures.attention} attention · {figures.decode}"))
        blocks = (
            f"{figures.blocks_held:,} held, {figures.blocks_cached:,} cached, {figures.blocks_free:,} free"
        )
        if figures.speculation:
            pairs.append(("speculation", figures.speculation))
        pairs.append(("weights", weights_text(figures)))
        cache = (
            f"{bytes_text(figures.kv_bytes)} in blocks of {counted(figures.block_size, 'token')}: {blocks}"
        )
        if figures.kv_token_bytes:
            cache += f" · {figures.kv_dtype}, {bytes_text(figures.kv_token_bytes)} a token"
        if figures.kv_window_bytes:
            kinds = "recent inputs of recurrent layers" if figures.state_slots else "layers with a window"
            cache += f" · {bytes_text(figures.kv_window_bytes)} of it for {kinds}"
        if figures.kv_share and figures.device != "cpu":
            cache += f" · {figures.kv_share:.0%} of the memory beside the weights"
        pairs.append(("KV cache", cache))
        if figures.state_slots:
            room = f"room for {figures.state_slots:,}, {bytes_text(figures.state_bytes)} each"
            pairs.append(("recurrence", f"states kept at {counted(figures.marks, 'place')}, {room}"))
        if figures.offload is not None:
            pairs.append(("evicted", _offload(figures.offload)))
        if figures.disk is not None:
            pairs.append(("on disk", _disk(figures.disk, bool(figures.state_slots))))
        if figures.bandwidth:
            pairs.append(("bandwidth", f"{bytes_text(figures.bandwidth)}/s"))
    if machine is not None:
        text = f"{seconds_text(machine.since_s)} since start · {seconds_text(machine.cpu_s)} of CPU time"
        if machine.peak_bytes is not None:
            text += f" · {bytes_text(machine.peak_bytes)} peak memory"
        pairs.append(("process", text))
    return pairs


def _disk(disk: DiskFigures, has_states: bool) -> str:
    """Say what the disk holds of conversations, and what restoring it costs."""
    if disk.problem:
        return disk.problem
    costs = _costs(disk.brought_s, disk.computed_s)
    if not disk.is_used:
        return f"recomputed, not restored: restoring takes {costs}"
    kinds = " and pieces of states" if has_states else ""
    text = f"{counted(disk.blocks, 'block')}{kinds} · {counted(disk.written_tokens, 'token')} written"
    back = f", {counted(disk.restored_tokens, 'token')} restored"
    cold = _costs(disk.cold_s, disk.computed_s)
    told = (f", {costs}" if costs else "") + (f"; from the disk itself {cold}" if cold else "")
    return text + (back + told if disk.restored_tokens else "")


def _costs(brought_s: float | None, computed_s: float | None) -> str:
    """Compare the time to restore a token and to recompute it; "" until both are known."""
    if brought_s is None or computed_s is None:
        return ""
    return f"{brought_s * 1e6:.1f} µs per token, recomputing {computed_s * 1e6:.1f}"


def _offload(offload: OffloadFigures) -> str:
    """Say what became of evicted blocks, and what restoring them costs."""
    costs = _costs(offload.brought_s, offload.computed_s)
    if not offload.is_used:
        return f"recomputed, not restored: restoring takes {costs}"
    held = [counted(offload.blocks, "block"), *([counted(offload.states, "state")] if offload.states else [])]
    text = f"{' and '.join(held)} in {bytes_text(offload.bytes)} of host memory"
    back = f" · {counted(offload.restored_tokens, 'token')} restored"
    return text + (back + (f", {costs}" if costs else "") if offload.restored_tokens else "")


def _pairs(pairs: list[tuple[str, str]], width: int) -> list[Line]:
    column = max([11, *(cells(name) + 1 for name, _ in pairs)])
    lines: list[Line] = []
    for name, text in pairs:
        if longest_word([(text, "")]) > width - column:  # put it below the name instead of breaking it
            lines += [[(name, "muted")], *wrap([(text, "")], width)]
            continue
        for row, part in enumerate(wrap([(text, "")], max(width - column, 8))):
            lines.append([((name if row == 0 else "").ljust(column), "muted"), *part])
    return lines


def _guessed(stats: TurnStats | SessionStats) -> str:
    return guesses_text(stats.guessed_tokens, stats.accepted_tokens) or _NONE


def _drafted(stats: TurnStats | SessionStats) -> str:
    return guesses_text(stats.drafted_tokens, stats.accepted_drafts) or _NONE


def _repeated(stats: TurnStats | SessionStats) -> str:
    guessed, accepted = (
        stats.guessed_tokens - stats.drafted_tokens,
        stats.accepted_tokens - stats.accepted_drafts,
    )
    return guesses_text(guessed, accepted) or _NONE


def _a_step(stats: TurnStats | SessionStats) -> str:
    return f"{tokens_a_step(stats.generated_tokens, stats.accepted_tokens):.2f}"


def _saved(stats: TurnStats | SessionStats) -> str:
    return seconds_text(stats.saved_s) if has_gained(stats) else _NONE


def _cached_share(stats: TurnStats | SessionStats) -> str:
    return _share(stats.cached_tokens, stats.split_tokens)


def _mean_ttft(stats: SessionStats) -> str:
    return seconds_text(sum(stats.ttfts) / len(stats.ttfts)) if stats.ttfts else _NONE


def _prefill(stats: SessionStats) -> str:
    return _rate(stats.timed_tokens / stats.prefill_s if stats.prefill_s else 0.0)


def _decode(stats: TurnStats | SessionStats) -> str:
    return _rate(decode_rate(stats))


def _decode_time(stats: TurnStats | SessionStats) -> str:
    return seconds_text(stats.decode_s) if stats.decode_s else _NONE


def _computed_again(stats: SessionStats) -> str:
    return f"{stats.retried_tokens - stats.reused_tokens:,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else _NONE


def _rate(tokens_per_s: float) -> str:
    return rate_text(tokens_per_s) if tokens_per_s else _NONE
