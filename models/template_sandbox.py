"""The Jinja sandbox that chat templates run in: a template may come from anyone.

It offers what Hugging Face chat templates rely on, refuses what reaches into Python, and stops a template
that runs too long or builds too much. Loops, calls and operators are checked; a process of its own would be
safer still, and far slower.
"""

import functools
import json
import re
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

MAX_SECONDS = 5.0
MAX_SIZE = 32 * 2**20
"""Characters of a string, or items of a list, that a template may make; no context holds as much."""
MAX_NUMBER = 100_000
"""The largest number that a template may hand to a function: a width, a count, an indent."""

_BIG_WIDTH = re.compile(r"\d{6,}")


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or built too much."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Set `deadline` (time.monotonic() seconds) before rendering; one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    deadline = float("inf")

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        self.globals.pop("lipsum")  # text of any length, of no use in a chat
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}

    def check_time(self) -> None:
        """Raises TemplateLimitError after the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it ran for more than {MAX_SECONDS:g} s")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, with the time checked at each one; every loop of a template runs through it."""
        for item in items:
            self.check_time()
            yield item

    def joined(self, parts: Iterable[Any]) -> str:
        """What `~` does: the texts of all parts, joined."""
        texts = [str(part) for part in parts]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes here."""
        self.check_time()
        if not isinstance(function, jinja2.runtime.Macro):
            owner = getattr(function, "__self__", None)
            subject = (owner,) if isinstance(owner, str) else ()
            check_arguments(getattr(function, "__name__", ""), subject + args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        check_size(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every operator named in `intercepted_binops` comes here."""
        if operator == "+":
            check_size(_size(left) + _size(right))
        elif operator == "*":
            check_size(max(_size(left) * _count(right), _size(right) * _count(left)))
        elif operator == "**":
            check_size(_count(left).bit_length() * _count(right))
        elif isinstance(left, str):  # "%": old-style formatting
            check_format(left, right)
        return super().call_binop(context, operator, left, right)

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


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, with its arguments and its result checked."""

    @functools.wraps(function)  # also keeps the mark by which Jinja knows filters that want the environment
    def limited(*args: Any, **kwargs: Any) -> Any:
        wants = hasattr(function, "jinja_pass_arg")
        check_arguments(name, args[1:] if wants else args, kwargs)
        result = function(*args, **kwargs)
        check_size(_size(result))
        return result

    return limited


def check_size(size: int) -> None:
    """Raises TemplateLimitError for more than MAX_SIZE characters or items."""
    if size > MAX_SIZE:
        raise TemplateLimitError("it builds a text that is too large")


def check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would make the function or filter `name` run long or build too much.

    `args` begins with the string it works on, where there is one. Raises TemplateLimitError.
    """
    values = [*args, *kwargs.values()]
    for value in values[1:] if name not in ("range",) else []:
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"it calls {name} with a number that is too large")
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    elif name in ("format", "format_map") and texts:
        check_format(texts[0], values[1:])
    elif name == "join":
        parts = next((value for value in values if isinstance(value, list | tuple)), ())
        check_size(sum(_size(part) for part in parts) + len(parts) * sum(map(len, texts)))


def check_format(template: str, values: Any) -> None:
    """Refuse formatting to a huge width. Raises TemplateLimitError."""
    numbers = values if isinstance(values, list | tuple) else [values]
    wide = any(isinstance(number, int) and abs(number) > MAX_NUMBER for number in numbers)
    if _BIG_WIDTH.search(template) or ("*" in template and wide):
        raise TemplateLimitError("it formats to a width that is too large")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


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
