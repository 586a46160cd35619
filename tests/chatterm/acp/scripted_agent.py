"""`chatterm acp` with a backend that plays a script, for the tests: the first argument is a JSON list of scripts."""

import json
import os
import sys
import threading
from typing import Any

from chatterm.acp.serve import serve
from chatterm.backends.backend import EngineError, ToolCall
from chatterm.sessions.store import SessionStore
from tests.chatterm.scripted import Script, ScriptedBackend


def scripted(scripts: list[dict[str, Any]]) -> ScriptedBackend:
    """Answers as `Script` has them, but that `calls` have arguments as objects and `waits` is a gate."""
    return ScriptedBackend([_script(**given) for given in scripts], thinks=True)


def _script(calls: Any = (), waits: bool = False, error: str | None = None, **given: Any) -> Script:
    return Script(
        **given,
        calls=tuple(ToolCall(name, json.dumps(arguments)) for name, arguments in calls),
        gate=threading.Event() if waits else None,
        error=EngineError(error) if error is not None else None,
    )


if __name__ == "__main__":
    backend = scripted(json.loads(sys.argv[1]))
    is_saved = serve(backend, SessionStore.open(), sampling={}, settings={}, tools="", version="0")
    print(json.dumps([name for name, _ in backend.calls]), file=sys.stderr)
    os._exit(0 if is_saved else 1)
