"""Line charts over the turns of a chat, or over lengths, in one SVG file."""

from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT, LEFT, TOP, GAP = 520, 300, 64, 84, 56


@dataclass(frozen=True, slots=True)
class Line:
    """One value per turn or length, None if missing. Values below the foot of the scale, including 0, lie on it."""

    name: str
    colour: str
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the turns 1, 2, ... on a logarithmic scale. `labels` replace the turn numbers."""

    title: str
    lines: list[Line]
    along: str = "turn"
    labels: tuple[str, ...] = ()


def page(title: str, charts: list[Chart], below: str) -> str:
    """Draw the charts side by side, with one legend above and a line of text below."""
    width = len(charts) * (WIDTH + LEFT + GAP) - GAP + 24
    height = TOP + HEIGHT + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="17" font-weight="bold">{escape(title)}</text>',
    ]
    x = 16
    for line in charts[0].lines:
        parts.append(f'<rect x="{x}" y="38" width="18" height="5" fill="{line.colour}"/>')
        parts.append(f'<text x="{x + 24}" y="45">{escape(line.name)}</text>')
        x += 44 + 8 * len(line.name)
    for index, chart in enumerate(charts):
        parts += _chart(chart, LEFT + index * (WIDTH + LEFT + GAP))
    parts.append(f'<text x="16" y="{height - 12}" fill="#555555">{escape(below)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _chart(chart: Chart, left: int) -> list[str]:
    values = [value for line in chart.lines for value in line.values if value]
    low, high = floor(log10(min(values, default=1.0))), ceil(log10(max(values, default=1.0)))
    if any(value == 0 for line in chart.lines for value in line.values):
        low -= 1
    high = max(high, low + 1)
    turns = max(len(line.values) for line in chart.lines)

    def x(turn: int) -> float:
        return left + (turn - 1) * WIDTH / max(turns - 1, 1)

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - (log10(value) if value else low)) / (high - low)

    parts = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{escape(chart.title)}</text>']
    for power in range(low, high + 1):
        zero = power == low and any(value == 0 for line in chart.lines for value in line.values)
        at, shown = y(10.0**power), "0" if zero else f"{10.0**power:,.10g}"
        parts.append(f'<path d="M{left} {at:.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{shown}</text>')
    for turn in range(1, turns + 1):
        if chart.labels or turn == 1 or turn % 5 == 0:
            shown = escape(chart.labels[turn - 1]) if chart.labels else str(turn)
            parts.append(
                f'<text x="{x(turn):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{shown}</text>'
            )
    middle = left + WIDTH / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{TOP + HEIGHT + 40}" text-anchor="middle">{escape(chart.along)}</text>'
    )
    for line in chart.lines:
        seen = [(turn, value) for turn, value in enumerate(line.values, 1) if value is not None]
        points = [f"{x(turn):.1f} {y(value):.1f}" for turn, value in seen]
        parts.append(
            f'<path d="M{" L".join(points)}" fill="none" stroke="{line.colour}" stroke-width="2.5"/>'
        )
        parts += [
            f'<circle cx="{point.split()[0]}" cy="{point.split()[1]}" r="3" fill="{line.colour}"/>'
            for point in points
        ]
    return parts
