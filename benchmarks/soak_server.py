"""A `chatterm serve` that a benchmark runs, apart from other servers here, and the resources of its two processes."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.request import ProxyHandler, build_opener

CHATTERM = (sys.executable, "-c", "from chatterm.cli.main import main; main()")
_ADDRESS = re.compile(r"The HTTP API is at (http://\S+)/v1")


@dataclass(frozen=True, slots=True)
class Held:
    """The resources that a process holds."""

    bytes: int
    """Its own memory, without files in the page cache."""
    files: int
    """File descriptors, including sockets."""
    sockets: int
    threads: int


@dataclass(slots=True)
class RunningServer:
    """A server of this benchmark."""

    url: str
    model: str
    """The name that requests use."""
    given: str
    """The model as given to `chatterm serve` and to terminals."""
    folder: Path
    """Its runtime folder, which also receives its error log."""
    process: "subprocess.Popen[str]"
    log: IO[str]

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the web process and the engine process."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (engine,) = (int(pid) for task in tasks for pid in task.read_text().split())
        return {"web": self.process.pid, "engine": engine}

    def held(self) -> dict[str, Held]:
        """Return the resources that both processes hold now."""
        return {name: held_by(pid) for name, pid in self.pids.items()}

    def said(self) -> str:
        """Return everything that the server has printed, and the errors that it has logged."""
        self.log.flush()
        errors = self.folder / "errors.log"
        written = errors.read_text("utf-8", "replace") if errors.exists() else ""
        return Path(self.log.name).read_text("utf-8", "replace") + written


def held_by(pid: int) -> Held:
    """Return the resources that a process holds. Linux only; raises OSError if there is no such process."""
    place = Path(f"/proc/{pid}")
    lines = place.joinpath("status").read_text().splitlines()
    fields = {
        name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()
    }
    targets = []
    for each in place.joinpath("fd").iterdir():
        with suppress(OSError):  # it was just closed
            targets.append(str(each.readlink()))
    return Held(
        bytes=sum(int(fields.get(name, "0")) * 1024 for name in ("RssAnon", "RssShmem")),
        files=len(targets),
        sockets=sum(target.startswith("socket:") for target in targets),
        threads=int(fields["Threads"]),
    )


def get(url: str, timeout: float = 30.0) -> Any:
    """Return the JSON at a URL of this machine. Raises OSError."""
    with build_opener(ProxyHandler({})).open(url, timeout=timeout) as response:
        return json.loads(response.read())


@contextmanager
def chatterm_server(model: str, *options: str) -> Iterator[RunningServer]:
    """Run a server of `model` (a name, a folder, a .gguf file) on a free port, with a runtime folder of its own.

    CHATTERM_RUNTIME names that folder while it runs. Raises RuntimeError if the server does not start.
    """
    before = {name: os.environ.get(name) for name in ("CHATTERM_RUNTIME", "CHATTERM_DATA")}
    with tempfile.TemporaryDirectory(prefix="ct") as folder:
        os.environ.update(CHATTERM_RUNTIME=folder, CHATTERM_DATA=folder)
        log = (Path(folder) / "server.log").open("w", encoding="utf-8")
        process = subprocess.Popen(
            [*CHATTERM, "serve", model, "--port", "0", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            url = _ready(process, Path(log.name))
            name = get(f"{url}/v1/models")["data"][0]["id"]
            yield RunningServer(url, name, model, Path(folder), process, log)
        finally:
            process.terminate()
            process.wait(60)
            log.close()
            for variable, value in before.items():
                os.environ.pop(variable, None)
                if value is not None:
                    os.environ[variable] = value


def _ready(process: "subprocess.Popen[str]", log: Path) -> str:
    """Wait until the server answers; return its address."""
    while True:
        said = log.read_text("utf-8", "replace")
        if process.poll() is not None:
            raise RuntimeError(f"The server did not start: {said.strip()[-300:]}")
        if "\nReady for" in said and (found := _ADDRESS.search(said)) is not None:
            with suppress(OSError):
                get(f"{found[1]}/health")
                return found[1]
        time.sleep(0.05)
