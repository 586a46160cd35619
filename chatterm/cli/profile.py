"""`chatterm doctor --profile MODEL`: where the time of a token goes, as a picture, and as a trace for Perfetto."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from chatterm.cli.progress import progress_on
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from engine.execute.cuda.step_profile import ProfiledKernel

_WIDTH = 80
_STEPS = ".:-=+*#%@"
"""ASCII shades from the fastest layer to the slowest, if there are no block characters."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def profile(model: str, trace: Path, device: str = "auto") -> None:
    """Print where the time of a token of `model` goes, and write `trace`. Raises ModelError and EngineError."""
    from engine.device import check_tunable

    check_tunable(device)  # before a model is downloaded and loaded for nothing
    from engine.engine import Engine

    with progress_on(sys.stderr) as report:
        engine = Engine.load(model, device=device, on_progress=report)
    try:
        parts = engine.tuner().profile(trace)
    finally:
        engine.close()
    encoding = (sys.stdout.encoding or "").lower()
    print("\n".join(picture(one_line(model, 60), parts, blocks="utf" in encoding and sys.stdout.isatty())))
    print(f"\nFor the order in time, open {one_line(str(trace))} at https://ui.perfetto.dev")


def picture(model: str, parts: "Sequence[ProfiledKernel]", blocks: bool = True) -> list[str]:
    """Return lines with a bar for each kernel of a layer, and the layers side by side; in ASCII unless `blocks`."""
    whole = sum(part.seconds for part in parts)
    layers = 1 + max((part.layer for part in parts if part.layer is not None), default=-1)
    sums: dict[str, float] = {}
    for part in parts:
        name = part.name if part.layer is not None else f"{part.name}, once"
        sums[name] = sums.get(name, 0.0) + part.seconds
    most, width = max(sums.values()), max(map(len, sums))
    lines = [f"{model}: token 512 takes {whole * 1e3:.3f} ms in {layers} layers, without sampling.", ""]
    full = "█" if blocks else "#"
    for name, seconds in sums.items():
        once = name.endswith(", once")
        each = f"{seconds * 1e6 / (1 if once else layers):>8.1f} us" + ("        " if once else " a layer")
        figures = f"  {name.ljust(width)} {each} {seconds * 1e3:>7.3f} ms {seconds / whole:>6.1%}  "
        lines.append(figures + full * max(round((_WIDTH - len(figures)) * seconds / most), 1))
    times = [sum(part.seconds for part in parts if part.layer == number) for number in range(layers)]
    if times:
        shades, low, span = (_BLOCKS if blocks else _STEPS), min(times), max(times) - min(times)
        drawn = "".join(shades[round((one - low) / span * (len(shades) - 1)) if span else 0] for one in times)
        lines += ["", f"  Layers 1 to {layers}  {drawn}"]
        lines.append(f"  {low * 1e6:.1f} to {max(times) * 1e6:.1f} us, {mean(times) * 1e6:.1f} on average")
    return lines
