"""Running a shell command with a time limit, streamed output, and no process left behind."""

import codecs
import os
import re
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chatterm.backends.backend import Tool
from chatterm.tools.arguments import check_arguments, flat_schema
from chatterm.tools.builtin import sandbox
from chatterm.tools.danger import dangers
from chatterm.tools.output import Tail, bounded
from chatterm.tools.tool import Effect, Tone, ToolError, ToolPlan, ToolRun
from models.system import own_group

_LIMIT, _LONGEST = 60, 600
"""A command's default and longest time limit, in seconds."""
_REST = 0.005
"""Seconds to wait after each read, so that output printed line by line arrives in larger pieces."""
_LOOK = 0.1
"""Seconds between two checks of whether it was stopped."""
_GRACE = 0.5
"""Seconds to keep reading output after the command has ended, from processes it left running."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|_PAT\b", re.IGNORECASE)
_MARK = "CHATTERM_CALL"
"""An environment variable by which all processes of a call are found, even outside its process group."""
_MOST_CHARACTERS = 8_000


class RunCommand:
    effect: Effect = "run"
    tool = Tool(
        "run_command",
        "Run a command with /bin/sh in the working folder; gives its output and how it ended. There is no network, "
        "no input, and files may only be changed where writes is true.",
        flat_schema(
            ["command"],
            command=("string", "The command line."),
            writes=("boolean", "Whether it changes files in the working folder."),
            seconds=("integer", f"Its time limit; {_LIMIT} where it is left out."),
        ),
    )

    def __init__(self, folder: Path, bwrap: Callable[[], str | None] | None = None) -> None:
        """Run commands in `folder`. `bwrap` returns the sandbox's path or None; the default is `sandbox.program`."""
        self._folder = folder.resolve()
        self._bwrap = bwrap or sandbox.program

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        command, writes = given["command"], given.get("writes", False)
        limit = given.get("seconds", _LIMIT)
        if not command.strip() or "\0" in command:
            raise ToolError("The command is empty, or has a NUL in it.")
        if len(command) > _MOST_CHARACTERS:
            raise ToolError(f"The command has {len(command):,} characters; {_MOST_CHARACTERS:,} is the most.")
        if not 1 <= limit <= _LONGEST:
            raise ToolError(f"seconds must be from 1 to {_LONGEST}.")
        bwrap = self._bwrap()
        lines: list[tuple[str, Tone]] = [("command:", "text")]
        lines += [(f"  {row}", "text") for row in command.split("\n")]
        if bwrap is None:
            lines.append(
                (
                    "No sandbox: bubblewrap is not available here. The command runs with all your permissions.",
                    "warning",
                )
            )
        else:
            may = "may change files in the working folder" if writes else "may not change files"
            lines.append((f"In a sandbox: no network; it {may}.", "muted"))
        lines.append((f"Time limit: {limit} s.", "muted"))
        subject = command + (" [writes]" if writes else "") + (" [no sandbox]" if bwrap is None else "")

        def run(running: ToolRun) -> str:
            return self._run(command, bwrap, writes, limit, running)

        return ToolPlan("run_command", "run", subject, tuple(lines), run, dangers(command))

    def _run(self, command: str, bwrap: str | None, writes: bool, limit: int, running: ToolRun) -> str:
        line = ["/bin/sh", "-c", command]
        if bwrap is not None:
            line = sandbox.confined(bwrap, self._folder, line, Path.home(), writes)
        mark = secrets.token_hex(16)
        try:
            process = subprocess.Popen(
                line,
                cwd=self._folder,
                env=_environment() | {_MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                **own_group(),
            )
        except (OSError, ValueError) as error:
            raise ToolError(f"The command could not be started: {error}.") from None
        try:
            output, why = _followed(process, limit, running)
        finally:
            _end(process, mark)
        if why:
            return bounded(f"{output}\n[{why}]".lstrip("\n"))
        code = process.returncode
        ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return bounded(f"{output.rstrip(chr(10))}\n[{ended}]".lstrip("\n"))


def _followed(process: "subprocess.Popen[bytes]", limit: int, running: ToolRun) -> tuple[str, str]:
    """Return what a process prints until it ends, and why it was stopped early ("" if it was not)."""
    assert process.stdout is not None
    handle = process.stdout.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tail = Tail()
    until, over = time.monotonic() + limit, None
    why = ""
    while True:
        now = time.monotonic()
        if running.stopped.is_set():
            why = "stopped by the user"
        elif now > until:
            why = f"stopped after {limit} s"
        if why:
            break
        if over is None and process.poll() is not None:
            over = now + _GRACE
        if over is not None and now > over:
            break
        if not select.select([handle], [], [], _LOOK)[0]:
            continue
        data = os.read(handle, 65_536)
        if not data:
            with suppress(subprocess.TimeoutExpired):  # it may have closed its output and still run
                process.wait(_LOOK)
            if process.returncode is not None:
                break
            time.sleep(_LOOK)
            continue
        text = decoder.decode(data)
        tail.add(text)
        running.say(text)
        time.sleep(_REST)
    return tail.text, why


def _environment() -> dict[str, str]:
    """Return this process's environment without variables that look like secrets."""
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill a process and its descendants, including those that left its process group."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(5):
        if not (left := _marked(mark)):
            break
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.stdout is not None:
        process.stdout.close()


def _marked(mark: str) -> list[int]:
    """Return the pids of a call's processes, where /proc shows them."""
    found = []
    wanted = f"{_MARK}={mark}".encode()
    for name in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in name.read_bytes().split(b"\0"):
                found.append(int(name.parent.name))
    return found
