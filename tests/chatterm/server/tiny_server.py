"""The engine process with tiny random models, as a program: `tiny_server.py FOLDER`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from chatterm.backends.backend import ChatOptions
from chatterm.server.process.engine_process import EngineProcess, serve
from chatterm.server.spawn import ProcessOptions
from tests.chatterm.server.conftest import Gate, Tinies
from tests.engine.tiny import TinyEngine


def ready(calls: EngineProcess) -> None:
    print("ready", flush=True)


class Halting(Tinies):
    """A model that computes some steps and then no more."""

    def load(self, *arguments: Any) -> TinyEngine:
        engine = super().load(*arguments)
        Gate(engine, steps=8)
        return engine


tinies = Halting(Path(sys.argv[1]))
asyncio.run(serve(ProcessOptions(ChatOptions()), tinies, ready, sys.stdin.fileno()))
os._exit(0)
