"""The program in which a chat template runs: a template may come from anyone, and its author is nobody we know.

`models/text/chat_template.py` starts it as a process of its own, so that the operating system bounds what a template
takes: it ends a rendering after some seconds of processor time, or a minute in all, and refuses memory beyond a
limit. (macOS may not hold the limit of memory, Windows holds none.) In here Jinja's sandbox keeps templates away from
Python.

One line of JSON in, one out: first the template, which gets no answer, then what to render. Nothing but the standard
library and Jinja is imported.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MOST_SECONDS = 60
"""For one rendering by the clock; it matters only where something other than the processor is waited for."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What Hugging Face chat templates rely on, and nothing that reaches into Python."""

    def __init__(self) -> None:
        extensions = [jinja2.ext.loopcontrols, _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
        )
        self.filters["tojson"] = _tojson


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without attributes that begin with an underscore: they would reach into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The statements between the two tags."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def limit_time(seconds: float) -> None:
    """The system ends this process when so much processor time is spent, or a minute is over; 0 takes that back."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(MOST_SECONDS if seconds else 0)


def limit_memory(nbytes: int) -> None:
    """From now on this process gets no more than so much memory, and leaves no core file when it is ended."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":  # macOS refuses to set it, or does not hold it
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def answer(source: str, names: Mapping[str, Any], known: dict[str, jinja2.Template]) -> dict[str, str]:
    """What rendering gives: its `text`, or the `error`, which is one of the `template` itself or of rendering it."""
    try:
        failed = "template"
        if source not in known:
            known[source] = Sandbox().from_string(source)
        failed = "error"
        return {"text": known[source].render(names)}
    except MemoryError:
        return {failed: "it produces too much text"}
    except Exception as error:  # noqa: BLE001 - it is foreign code: whatever it raises is its failure
        return {failed: " ".join(str(error).split())[:300] or type(error).__name__}


def main(seconds: float, nbytes: int) -> None:
    """Answer until standard input ends. A rendering has `seconds` of processor time, everything `nbytes` of memory."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no reply
    limit_memory(nbytes)
    source = json.loads(requests.readline())
    known: dict[str, jinja2.Template] = {}
    for line in requests:
        limit_time(seconds)
        reply = json.dumps(answer(source, json.loads(line), known)).encode()
        limit_time(0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
