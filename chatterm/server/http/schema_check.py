"""Checks finished answers against what their schema forbids and no grammar can express."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from chatterm.server.http.answer_state import AnswerState
from chatterm.tool_calls.literals import Schemas

_PATIENCE = 5.0
"""Seconds that a check may take: schemas and expressions come from clients."""
_PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from jsonschema.validators import Draft202012Validator
from referencing import Registry
for schema, text in json.load(sys.stdin):
    if not Draft202012Validator(schema, registry=Registry()).is_valid(json.loads(text)):
        sys.exit(3)
"""
_DOES_NOT_FIT = 3


class SchemaChecker:
    """Checks answers one after the other, each in a process of its own, which cannot hold up anybody."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def fits(self, pairs: Sequence[tuple[Any, str]]) -> bool | None:
        """Return whether each text is JSON of its schema; None if that takes too long, or without jsonschema."""
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _PROGRAM, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
            )
            try:
                async with asyncio.timeout(_PATIENCE):
                    await process.communicate(msgspec.json.encode(pairs))
            except TimeoutError:
                return None
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
        return {0: True, _DOES_NOT_FIT: False}.get(process.returncode or 0)


def to_check(
    states: Sequence[AnswerState], schema: Mapping[str, Any] | None, tools: Schemas
) -> list[tuple[Any, str]]:
    """Return the schema and the text of each complete answer and of each complete call."""
    found: list[tuple[Any, str]] = []
    for state in states:
        found += [
            (tools[call.name], call.text) for call in state.calls if call.is_json and call.name in tools
        ]
        if schema is not None and not state.calls and state.reason == "eos":
            found.append((schema, state.text))
    return found
