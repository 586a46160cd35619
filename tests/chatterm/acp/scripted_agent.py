"""`chatterm acp` with a backend that plays a script, for the tests: the first argument is a JSON list of scripts."""

import json
import os
import sys
import threading

from chatterm.acp.serve import serve
from chatterm.backends.backend import EngineError, ToolCall
from chatterm.sessions.store import SessionStore
from tests.chatterm.scripted import Script, ScriptedBackend

scripts = []
for given in json.loads(sys.argv[1]):
    calls = tuple(ToolCall(name, json.dumps(arguments)) for name, arguments in given.pop("calls", []))
    gate = threading.Event() if given.pop("waits", False) else None
    error = EngineError(given.pop("error")) if "error" in given else None
    scripts.append(Script(**given, calls=calls, gate=gate, error=error))
backend = ScriptedBackend(scripts, thinks=True)
is_saved = serve(
    backend, SessionStore.open(), sampling={}, settings={}, tools=[*sys.argv, ""][2], version="0"
)
print(json.dumps([name for name, _ in backend.calls]), file=sys.stderr)
os._exit(0 if is_saved else 1)
