"""`chatterm doctor`: what this machine can do, as tables on a terminal, else as plain lines or JSON."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chatterm.cli.usage import check_output
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text

if TYPE_CHECKING:
    from rich.console import Console

    from engine.machine.expected import Speed
    from engine.machine.report import Machine


_STEPS = {"1": "one token", "16": "16 tokens at once", "prompt": "attention of a prompt"}
"""What was timed, by the key of a tuning's times."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report: rows of cells under a title."""

    title: str
    rows: Sequence[tuple[str, ...]]
    headers: tuple[str, ...] = ()
    right: frozenset[int] = frozenset()
    """Columns of numbers."""
    note: str = ""
    """A line below."""


def examine(device: str = "auto", *, as_json: bool = False) -> None:
    """Examine the machine, and of several GPUs the one that `device` names, and print the report.

    Whatever is broken becomes a line of the report, never an exception.
    """
    check_output()
    with _waiting("Checking this machine"):
        machine = _inspect(device)
    if isinstance(machine, str):
        print(json.dumps({"failures": [machine]}) if as_json else machine)
        return
    sandbox, missing = _sandbox()
    if as_json:
        print(json.dumps(asdict(machine) | {"sandbox": sandbox}))
    elif sys.stdout.isatty():
        from rich.console import Console

        _paint(Console(highlight=False), sections(machine, sandbox, missing))
    else:
        print(plain(sections(machine, sandbox, missing)))


def tune(model: str, device: str = "auto") -> None:
    """Measure how the kernels run best for a model, keep it for the next start, and print it.

    Raises ModelError and EngineError.
    """
    from chatterm.cli.progress import progress_on
    from engine.device import check_tunable

    check_tunable(device)  # before a model is downloaded and loaded for nothing
    from engine.engine import Engine
    from engine.execute.cuda.kernel_configs import describe

    with progress_on(sys.stderr) as report:
        engine = Engine.load(model, device=device, tune=False, on_progress=report)
    try:
        with _waiting("Tuning the kernels") as status:
            found = engine.tuner().run(lambda name: status.update(f"Tuning {name}") if status else None)
    finally:
        engine.close()
    rows = [(one_line(name, 80), describe(name, cut)) for name, cut in found.chosen.items()]
    times = [
        f"{_STEPS.get(kind, kind)} {before * 1e6:,.0f} us, tuned {after * 1e6:,.0f} us"
        for kind, (before, after) in found.seconds.items()
    ]
    none = [("Nothing to change: the built-in choices are the fastest here.",)]
    print(
        plain(
            [Section(f"Fastest choices for {one_line(model, 60)}", rows or none, note="; ".join(times) + ".")]
        )
    )


def _inspect(device: str) -> "Machine | str":
    try:
        from engine.machine.bandwidth import keep_bandwidth
        from engine.machine.report import inspect_machine  # brings torch
    except Exception as error:  # noqa: BLE001 - a torch that is half there raises all sorts of errors
        return f"torch cannot be imported ({one_line(str(error), 200)}); reinstall it: pip install torch"
    machine = inspect_machine(device)
    if machine.bandwidth is not None:
        keep_bandwidth(machine.device, machine.bandwidth)  # chats show how much of it they use
    if machine.host_bandwidth is not None:
        keep_bandwidth("cpu", machine.host_bandwidth)
    return machine


def _waiting(what: str) -> AbstractContextManager[Any]:
    if not sys.stderr.isatty():
        return nullcontext()
    from chatterm.cli.progress import bar_console

    return bar_console(sys.stderr).status(what)


def _sandbox() -> tuple[str, str]:
    """Return what the sandbox for commands of tools is, and a line that says what to install for one.

    The second is "" if nothing needs to be installed or nothing would help.
    """
    import shutil

    from chatterm.tools.builtin.sandbox import program

    if (bwrap := program()) is not None:
        return f"bubblewrap ({bwrap})", ""
    if sys.platform != "linux":
        return "none: bubblewrap needs Linux", ""
    if shutil.which("bwrap") is not None:
        return "none: bubblewrap is installed, but this system does not let it run", ""
    missing = (
        "bubblewrap is missing, so commands that a model runs (/tools) have no sandbox; install the package "
        "bubblewrap."
    )
    return "none: bubblewrap is missing", missing


def sections(machine: "Machine", sandbox: str = "", missing: str = "") -> list[Section]:
    """Return the sections of the report, from the hardware to suggestions.

    `sandbox` and `missing` are what `_sandbox` returns.
    """
    found = [_hardware(machine), _kernels(machine)]
    if sandbox:
        found.append(Section("Tools", [("Sandbox", one_line(sandbox, 300))]))
    if machine.tunings:
        found.append(_tunings(machine))
    found.append(_speeds(machine))
    if machine.splits:
        found.append(_splits(machine))
    if machine.drafts:
        found.append(_drafts(machine))
    advice = [(one_line(line),) for line in (*machine.advice, missing) if line]
    found.append(
        Section("Suggestions", advice or [("Nothing to install: everything useful here is present.",)])
    )
    if machine.failures:
        found.append(Section("Could not be determined", [(one_line(line),) for line in machine.failures]))
    return found


def _splits(machine: "Machine") -> Section:
    assert machine.links is not None
    count = machine.links.count
    rows = [
        (one.name, _rate(one.alone), _rate(one.divided), f"{one.divided / one.alone:.2f}x")
        for one in machine.splits
    ]
    return Section(
        f"Divided among {count} GPUs (--tensor-parallel {count})",
        rows,
        ("Model", "Tokens/s of one", "Of all", "Gain"),
        frozenset((1, 2, 3)),
        "Estimated from the bandwidth and the likely time for sums across GPUs; none of this was measured.",
    )


def _hardware(machine: "Machine") -> Section:
    gpu, cpu = machine.gpu, machine.cpu
    rows = [("GPU", "none usable by torch")]
    if gpu is not None:
        memory = f"{bytes_text(gpu.memory_free)} of {bytes_text(gpu.memory_total)} free"
        more = f"; {gpu.count} GPUs, using {_which(gpu.number)}" if gpu.count > 1 else ""
        rows = [("GPU", f"{gpu.name} ({gpu.capability}), {memory}{more}")]
    if (links := machine.links) is not None:
        kinds = " and ".join(one_line(kind) for kind in links.kinds) or "unknown"
        reach = (
            "each can access the others' memory" if links.direct else "not all can access each other's memory"
        )
        rows.append(("Links", f"{kinds} between {links.count} GPUs; {reach}"))
    if machine.driver or machine.driver_cuda:
        cuda = f", supports CUDA up to {machine.driver_cuda}" if machine.driver_cuda else ""
        rows.append(("Driver", f"{machine.driver or 'version unknown'}{cuda}"))
    if cpu is not None:
        cores = f"{cpu.cores} core{'s' if cpu.cores != 1 else ''}"
        rows.append(("CPU", ", ".join((cpu.name, cores, *cpu.instructions))))
    if machine.memory_total is not None and machine.memory_free is not None:
        rows.append(
            ("Memory", f"{bytes_text(machine.memory_free)} of {bytes_text(machine.memory_total)} free")
        )
    if machine.bandwidth is not None:
        how = "read by the CPU" if machine.device == "cpu" else "copied within the GPU"
        host = machine.host_bandwidth
        more = f", {host / 1e9:,.0f} GB/s of main memory read by the CPU" if host is not None else ""
        rows.append(("Bandwidth", f"{machine.bandwidth / 1e9:,.0f} GB/s {how}{more}, measured"))
    built = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "built without CUDA"
    built = "built for AMD GPUs" if gpu is not None and gpu.is_amd else built
    packages = [f"{name} {version}" for name, version in machine.packages.items()]
    packages[:1] = [f"{first} ({built})" for first in packages[:1]]
    rows.append(("Packages", ", ".join(packages)))
    rows.append(("Runs on", f"{machine.device}, {machine.dtype}"))
    return Section("Machine", [(label, one_line(value, 400)) for label, value in rows])


def _which(number: int) -> str:
    return f"cuda:{number}" if number else "the first"


def _kernels(machine: "Machine") -> Section:
    rows = []
    for label, features in (("Attention", machine.attention), ("Decode", machine.decode)):
        word = "used"
        for index, feature in enumerate(features):
            answer = word if feature.reason is None else "no: " + one_line(feature.reason, 300)
            rows.append(("" if index else label, feature.name, answer))
            word = word if feature.reason is not None else "works too"
    return Section("Kernels", rows)


def _tunings(machine: "Machine") -> Section:
    rows = []
    for tuning in machine.tunings:
        alone = tuning.seconds.get("1")
        rows.append(
            (
                one_line(tuning.model, 60),
                str(len(tuning.chosen)),
                *((f"{alone[0] * 1e6:,.0f} us", f"{alone[1] * 1e6:,.0f} us") if alone else ("-", "-")),
                f"{tuning.gain:.1%}",
            )
        )
    return Section(
        "Tuned for this GPU",
        rows,
        ("Model", "Choices", "Token untuned", "Token tuned", "Gain"),
        frozenset((1, 2, 3, 4)),
        "Times of token 512, as measured; chatterm doctor --tune MODEL measures again.",
    )


def _speeds(machine: "Machine") -> Section:
    program = machine.program
    layers = f", plus {program.layer_s * 1e6:.0f} us per layer" if program.layer_s else ""
    rows = []
    for speed in machine.speeds:
        fits = speed.fits
        where = "" if not speed.on_cpu else " (CPU)"
        rows.append(
            (
                speed.name,
                _parameters(speed.parameters),
                bytes_text(speed.weight_bytes),
                f"{speed.context:,}" if fits else "does not fit",
                _rate(speed.tokens_per_s) + where if fits else "-",
            )
        )
    return Section(
        "Expected speed",
        rows,
        ("Model", "Parameters", "Weights", "Context", "Tokens/s"),
        frozenset((1, 2, 3, 4)),
        f"Estimated for 512 tokens of context: {program.efficiency:.0%} of the memory bandwidth{layers}."
        + (_cache_line(machine.speeds) if machine.device != "cpu" else "")
        + _too_slow(machine.speeds),
    )


def _cache_line(speeds: "Sequence[Speed]") -> str:
    """Return sentences on the share of a GPU's memory for the KV cache of a chat, and on models that run on the CPU.

    A sentence that applies to none of `speeds` is left out.
    """
    shares = [f"{speed.kv_share:.0%}" for speed in sorted(speeds, key=_share) if _share(speed)]
    span = " to ".join(dict.fromkeys((shares[0], shares[-1]))) if shares else ""
    cache = f" The KV cache of a chat takes {span} of the memory beside the weights; --context limits it."
    cpu = " (CPU): the GPU has no room for it."
    return cache * bool(shares) + cpu * any(speed.on_cpu for speed in speeds)


def _share(speed: "Speed") -> float:
    return 0.0 if speed.on_cpu else speed.kv_share


def _drafts(machine: "Machine") -> Section:
    rows = [
        (
            one_line(pair.model, 60),
            one_line(pair.draft, 60),
            bytes_text(pair.weight_bytes),
            bytes_text(pair.kv_bytes),
            "yes" if pair.fits else "no",
        )
        for pair in machine.drafts
    ]
    return Section(
        "Draft models",
        rows,
        ("Model", "Draft model", "Weights", "KV cache", "Fits"),
        frozenset((2, 3)),
        "With --draft auto they guess what comes next, where that saves time; the text stays the same.",
    )


def _too_slow(speeds: "Sequence[Speed]") -> str:
    """Return a sentence on the models that fit but are slow, with their speed under `--quantize int4`."""
    slow = []
    for speed in speeds:
        if speed.crawls:
            int4 = (
                f"; with --quantize int4 {_rate(speed.int4_tokens_per_s)}" if speed.int4_tokens_per_s else ""
            )
            slow.append(f"{speed.name} ({_rate(speed.tokens_per_s)}{int4})")
    return f" These fit but are slow here: {', '.join(slow)}." if slow else ""


def _parameters(count: int) -> str:
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def _rate(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return "unknown"
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 9.95 else f"{tokens_per_s:.1f}"


def plain(report: Sequence[Section]) -> str:
    """Format the report as plain text, one row per line, for pipes and bug reports."""
    lines: list[str] = []
    for section in report:
        rows = [section.headers, *section.rows] if section.headers else list(section.rows)
        columns = range(max((len(row) for row in rows), default=0))
        widths = [max(len(row[column]) for row in rows) for column in columns]
        lines += ["", section.title] if lines else [section.title]
        for row in rows:
            cells = [
                cell.rjust(width) if column in section.right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        if section.note:
            lines.append("  " + section.note)
    return "\n".join(lines)


def _paint(console: "Console", report: Sequence[Section]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for section in report:
        console.print(Text(section.title, style="bold"))
        table = Table(box=None, pad_edge=False, show_header=bool(section.headers), header_style="dim")
        last = max((len(row) for row in section.rows), default=0) - 1
        for column in range(last + 1):
            table.add_column(
                section.headers[column] if section.headers else "",
                justify="right" if column in section.right else "left",
                no_wrap=bool(section.headers) or column < last,
                overflow="fold",
                style="dim" if column == 0 and last == 1 else "",
            )
        for row in section.rows:
            table.add_row(*(_painted(cell) for cell in row))
        console.print(Padding(table, (0, 0, 0 if section.note else 1, 2)))
        if section.note:
            console.print(Padding(Text(section.note, style="dim"), (0, 0, 1, 2)))


def _painted(cell: str) -> Any:
    from rich.text import Text

    if cell in ("used", "works too"):
        return Text(cell, style="green")
    return Text(cell, style="yellow" if cell.startswith(("no: ", "does not fit")) else "")
