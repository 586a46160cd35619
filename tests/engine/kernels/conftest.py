"""Triton's interpreter, without what it does again and again."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        pass
    else:
        # Whenever a kernel calls a function, the interpreter patches the language once more, which takes as long as
        # everything else it does. Once for a launch will do.
        patched: set[tuple[bool, bool]] = set()
        launch = interpreter.GridExecutor.__call__

        @cache
        def sees(function: Callable[..., Any]) -> tuple[bool, bool]:
            """Which of the modules that are patched a function knows."""
            known = list(map(id, function.__globals__.values()))
            return id(language) in known, id(language.core) in known

        def patch(call: Any) -> None:
            if sees(call.fn) not in patched:
                patched.add(sees(call.fn))
                interpreter._patch_lang(call.fn)

        def launch_anew(self: Any, *args: Any, **options: Any) -> None:
            patched.clear()
            launch(self, *args, **options)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            patch(self)
            return self.rewrite()(*args, **options)

        # Indices are small here and hashes may wrap: to look for overflows in every sum takes a third of the rest.
        interpreter.interpreter_builder.options = replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
        interpreter.GridExecutor.__call__ = launch_anew
        interpreter.InterpretedFunction.__call__ = call
