"""Keystrokes in the chat screen while three tools print: from the byte written to the terminal to the frame with it.

    python benchmarks/tui_tools.py                  about a minute
    python benchmarks/tui_tools.py --flood          each prints as fast as it can

The model's answer has three calls, each of which runs a command that prints a few thousand lines a second; they are
done in turn, and beside the one that is shown two more print into pipes of this benchmark, so that three run at once.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tui import LETTERS, PATIENCE, Terminal, quantile, start

GOAL = 50.0
"""Milliseconds at the 99th percentile."""
_PACED = "while sleep 0.005; do seq 20; done"
_FLOOD = "yes a line of output that is as long as most lines are"


async def program(arguments: argparse.Namespace) -> None:
    """Run the application on this process's terminal, with a model that calls tools for ever."""
    from chatterm.app import ChatApp
    from chatterm.backends.backend import ToolCall
    from chatterm.tools.policy import Policy
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
    others = [subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE) for _ in range(2)]
    pipes = [other.stdout.fileno() for other in others if other.stdout is not None]
    loop = asyncio.get_running_loop()
    for pipe in pipes:
        loop.run_in_executor(None, _drain, pipe)
    out.write(json.dumps({"event": "ready"}) + "\n")
    await asyncio.sleep(arguments.tokens)
    out.write(json.dumps({"event": "done"}) + "\n")
    for other in others:
        other.kill()
        other.wait()
    app.chat.tooling.close()
    app.exit(0)
    await running
    app.worker.close()


def _drain(pipe: int) -> None:
    while os.read(pipe, 1 << 16):
        pass


def typed(terminal: Terminal, pause: float) -> list[float]:
    """Seconds from each letter to its frame, until the program is done."""
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
        keys = typed(_started(arguments), arguments.pause)
    shown = {name: 1000 * quantile(keys, share) for name, share in (("median", 0.5), ("p99", 0.99))}
    print(f"{len(keys)} keys, median {shown['median']:.1f} ms, 99th percentile {shown['p99']:.1f} ms")
    print(f"goal: <= {GOAL:g} ms at the 99th percentile: {'met' if shown['p99'] <= GOAL else 'MISSED'}")


def _started(arguments: argparse.Namespace) -> Terminal:
    terminal = start(arguments, "", __file__)
    terminal.until("ready")
    return terminal


if __name__ == "__main__":
    main()
