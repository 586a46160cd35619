"""The program that runs a chat template; anyone may have written the template, so it is not trusted.

`models/text/chat_template.py` starts it as a separate process, so that the operating system limits what a template
takes: it ends a rendering after some seconds of processor time, or a minute in all, and refuses memory beyond a
limit. (macOS may not enforce the memory limit; Windows enforces no limit.) Inside the process, Jinja's sandbox keeps
templates away from Python.

It reads lines of JSON: first the template, which gets no reply, then requests, each of which gets one line. Only the
standard library and Jinja are imported.
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
"""Wall-clock time for one rendering; it only matters if a rendering waits for something other than the processor."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that Hugging Face chat templates rely on, with no access to Python."""

    def __init__(self) -> None:
        extensions = [jinja2.ext.loopcontrols, _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
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
    # Jinja's own filter escapes HTML, but no model was trained on that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without attributes that begin with an underscore, which would give access to Python."""

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
    """`{% generation %}...{% endgeneration %}` marks text to train on; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the statements between the two tags."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def limit_time(seconds: float) -> None:
    """Let the system end this process after `seconds` of processor time, or after a minute; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(MOST_SECONDS if seconds else 0)


def limit_memory(nbytes: int) -> None:
    """Limit this process to `nbytes` of memory from now on, and let it write no core file."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS refuses the limit, or does not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def answer(source: str, names: Mapping[str, Any], known: dict[str, jinja2.Template]) -> dict[str, str]:
    """Render a template. Return its `text`, an error of the `template` itself, or an `error` of this rendering."""
    try:
        failed = "template"
        if source not in known:
            known[source] = Sandbox().from_string(source)
        failed = "error"
        return {"text": known[source].render(names)}
    except MemoryError:
        return {failed: "it produces too much text"}
    except Exception as error:  # noqa: BLE001 - the template is foreign code and may raise anything
        return {failed: " ".join(str(error).split())[:300] or type(error).__name__}


def main(seconds: float, nbytes: int) -> None:
    """Reply until standard input ends, with `seconds` of processor time per rendering and `nbytes` of memory in all."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else that is printed may look like a reply
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
