"""Run as a program: the application, with a model that calls a server's tool; the call is the program's arguments."""

import sys

from chatterm.app import run_app
from chatterm.backends.backend import ToolCall
from tests.chatterm.scripted import Script, ScriptedBackend

CALL = (ToolCall(*(sys.argv[1:3] or ("here__add", '{"a": 20, "b": 22}'))),)
model = ScriptedBackend(
    [
        Script("I compute.", calls=CALL),
        Script("That was no."),
        Script("Again.", calls=CALL),
        Script("That was yes."),
    ]
)
raise SystemExit(run_app(model, theme=None))
