"""The Jinja sandbox that chat templates run in: a template may come from anyone.

It offers what Hugging Face chat templates rely on, refuses what reaches into Python, and stops a template
that runs too long or builds too much. Loops, calls and operators are checked; a process of its own would be
safer still, and far slower.
"""

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from models.template_limits import (
    TemplateLimitError,
    check_arguments,
    check_operator,
    check_size,
    check_text,
    size_of,
)

# Filters whose result is text, whatever they are given.
_TEXT_FILTERS = {
    "string",
    "tojson",
    "pprint",
    "urlencode",
    "escape",
    "e",
    "forceescape",
    "safe",
    "indent",
    "center",
}


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Set `deadline` (time.monotonic() seconds) before rendering; one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    deadline = float("inf")

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_checked_output,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        self.globals.pop("lipsum")  # text of any length, of no use in a chat
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}

    def check_time(self) -> None:
        """Raises TemplateLimitError after the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateLimitError("it takes too long")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, with the time checked at each one; every loop of a template runs through it."""
        for item in items:
            self.check_time()
            yield item

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro or a block writes, joined."""
        parts = list(parts)
        check_size(sum(map(len, parts)))
        return "".join(parts)

    def joined(self, parts: list[Any]) -> str:
        """What `~` does: the texts of all parts, joined."""
        check_text(parts)
        return self.concat(str(part) for part in parts)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes here."""
        self.check_time()
        if not isinstance(function, jinja2.runtime.Macro):
            # What the sandbox puts in the place of str.format wraps it.
            subject = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            values = [*([subject] if isinstance(subject, str) else []), *args, *kwargs.values()]
            check_arguments(getattr(function, "__name__", ""), values)
        result = super().call(context, function, *args, **kwargs)
        check_size(size_of(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every operator named in `intercepted_binops` comes here."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` also keeps the mark by which Jinja knows filters that want the environment.
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            first = 1 if hasattr(function, "jinja_pass_arg") else 0
            values = list(args)
            if name in ("join", "sum") and len(values) > first and not isinstance(values[first], str):
                values[first] = self.counted(values[first]) if name == "sum" else list(values[first])
            if name in _TEXT_FILTERS:
                check_text(values[first:])
            check_arguments(name, [*values[first:], *kwargs.values()])
            result = function(*values, **kwargs)
            check_size(size_of(result))
            return result

        return limited

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        guard = _Guard()
        guard.visit(tree)
        tree.set_environment(self)
        return tree


class _Guard(jinja2.visitor.NodeTransformer):
    """Sends what every loop runs over through `Sandbox.counted`, and every `~` through `Sandbox.joined`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("joined", jinja2.nodes.List(node.nodes, lineno=node.lineno))


def _call(method: str, argument: jinja2.nodes.Node) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(method, lineno=argument.lineno)
    return jinja2.nodes.Call(function, [argument], [], None, None, lineno=argument.lineno)


def _checked_output(value: Any) -> Any:
    check_text(value)
    return value


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
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The statements between the two tags."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)
