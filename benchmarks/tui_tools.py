"""Keystrokes in the chat screen while three tools print: from the byte written to the terminal to the frame with it.

    python benchmarks/tui_tools.py                  about a minute
    python benchmarks/tui_tools.py --flood          each prints as fast as it can

The model's answers call a command that prints some 2,000 lines per second. The screen runs the calls one after the
other; two more commands run in the same process, so that three run at once.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tui import LETTERS, PATIENCE, Terminal, quantile, start

GOAL = 50.0
"""Milliseconds at the 99th percentile."""
_PRINT = (
    "import time\nwhile True: print('a line of output' * 4 + chr(10), end='', flush=True); time.sleep(0.0005)"
)
_PACED = f'exec python3 -c "{_PRINT}"'
_FLOOD = "yes a line of output that is as long as most lines are"


async def program(arguments: argparse.Namespace) -> None:
    """Run the application on this process's terminal, with a model that calls tools forever."""
    from chatterm.app import ChatApp
    from chatterm.backends.backend import ToolCall
    from chatterm.tools.policy import Policy
    from chatterm.tools.session import performed
    from chatterm.tools.tool import ToolRun
    from tests.chatterm.scripted import Script, ScriptedBackend

    out = os.fdopen(arguments.report_to, "w", buffering=1)
    Policy.why_ask = lambda self, plan: ""  # type: ignore[method-assign]
    line = _FLOOD if arguments.rate else _PACED
    call = ToolCall("run_command", json.dumps({"command": line, "seconds": 5}))
    backend = ScriptedBackend([Script("Three tools.", calls=(call,) * 3)])
    app = ChatApp(backend, theme="graphite")
    running = asyncio.create_task(app.run_async())
    while not running.done() and not app.chat.is_idle:
        await asyncio.sleep(0.05)
    app.chat.tooling.session.box.on.add("run_command")
    app.chat.tooling.offer()
    plan = app.chat.tooling.session.plan(
        ToolCall("run_command", json.dumps({"command": line, "seconds": 600}))
    )
    others = [ToolRun(say=lambda text: None) for _ in range(2)]
    for other in others:
        threading.Thread(target=performed, args=(call, plan, other), daemon=True).start()
    out.write(json.dumps({"event": "ready"}) + "\n")
    await asyncio.sleep(arguments.tokens)
    out.write(json.dumps({"event": "done"}) + "\n")
    for other in others:
        other.stopped.set()
    app.chat.tooling.close()
    app.exit(0)
    await running
    app.worker.close()


def typed(terminal: Terminal, pause: float) -> list[float]:
    """Type letters until the program is done; return the seconds from each letter to its frame."""
    terminal.write("go on\r")
    while b"running" not in terminal.shown:
        if not terminal.read(10.0):
            raise SystemExit("No tool ran.")
    terminal.wait(1.0)
    rng, taken = random.Random(2), list[float]()
    while terminal.latest("done") is None:
        letter = LETTERS[len(taken) % len(LETTERS)]
        terminal.shown = b""
        began = time.monotonic()
        terminal.write(letter)
        while letter.encode() not in terminal.shown and time.monotonic() < began + PATIENCE:
            if not terminal.read(began + PATIENCE - time.monotonic()):
                return taken
        taken.append(time.monotonic() - began)
        for key in ("\x7f", ""):
            if not terminal.wait(rng.uniform(0.2, 1.0) * pause):
                return taken
            terminal.write(key)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", "--seconds", type=float, default=50.0, help="how long keys are timed")
    parser.add_argument("--rate", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--flood", dest="rate", action="store_const", const=1)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two keys, about")
    for name in ("report-to", "messages", "answer"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--session", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report_to:
        asyncio.run(program(arguments))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CHATTERM_DATA": folder, "CHATTERM_CONFIG": f"{folder}/config.toml"}
        terminal = _started(arguments)
        stalls, over = list[float](), threading.Event()
        threading.Thread(target=_watch, args=(stalls, over), daemon=True).start()
        keys = typed(terminal, arguments.pause)
        over.set()
    shown = {name: 1000 * quantile(keys, share) for name, share in (("median", 0.5), ("p99", 0.99))}
    print(f"{len(keys)} keys, median {shown['median']:.1f} ms, 99th percentile {shown['p99']:.1f} ms")
    late = 1000 * quantile(stalls, 0.999)
    print(
        f"a process that only sleeps woke up {late:.1f} ms late at the 99.9th percentile: the machine's share"
    )
    print(f"goal: <= {GOAL:g} ms at the 99th percentile: {'met' if shown['p99'] <= GOAL else 'MISSED'}")


def _watch(stalls: list[float], over: threading.Event) -> None:
    """Record how late this otherwise idle process wakes up: the delay that the machine adds."""
    while not over.is_set():
        began = time.monotonic()
        time.sleep(0.005)
        stalls.append(time.monotonic() - began - 0.005)


def _started(arguments: argparse.Namespace) -> Terminal:
    terminal = start(arguments, "", __file__)
    terminal.until("ready")
    return terminal


if __name__ == "__main__":
    main()
