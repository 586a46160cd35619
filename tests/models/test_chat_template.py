"""Chat templates: what Hugging Face templates rely on works, what reaches out of the sandbox or runs away does not."""

import re
import threading
import time
from datetime import datetime
from typing import Any

import pytest

from models import chat_template, template_limits
from models.chat_template import ChatTemplate, Message
from models.errors import ModelError
from tests.models.tokenizer_data import tiny_tokenizer

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[Message] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(
        HELLO if messages is None else messages, **{"add_generation_prompt": False, **options}
    )


def rendered_or_refused(source: str) -> str:
    try:
        return render(source)
    except ModelError:
        return ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hello</s>"),
        ("{{ messages[0].role }}{{ pad_token }}{{ tools }}{{ documents }}", "userNoneNone"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        (
            "{% for x in 'abc' %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% endfor %}",
            "1TrueFalse3 2FalseFalse3 3FalseTrue3 ",
        ),
        ("{% for x in 'abc' %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}", "bacb"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}", "a1None"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, 2, 3, 4] if x % 2 == 0 %}{{ x }}{% endfor %}", "24"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f(x='b') }}", "<a><b>"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ [1, 2] | join(', ') }}{{ 'x' | upper }}{{ ' y ' | trim }}", "1, 2Xy"),
        ("{{ 'abc' | replace('b', '-') }}{{ 'abc'.replace('c', '') }}", "a-cab"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='content') | first }}", "hello"),
        ("{{ '%s-%d' | format('a', 3) }}{{ '%s' % 'b' }}{{ '{}'.format('c') }}", "a-3bc"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'abc'[1:] }}{{ 'x'.strip() }}{{ 'ab'.startswith('a') }}", "bbcxTrue"),
        ("{{ dict(a=1)['a'] }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ '-' * 3 }}{{ [0] * 2 }}", "110243---[0, 0]"),
        ("{{ 'a' in messages[0] }}{{ messages[0].get('x', 'y') }}{{ enable_thinking is defined }}", "FalseyFalse"),
        ("{{ 10000000 }}{{ 'x' if 'é' is string }}", "10000000x"),
    ],
)  # fmt: skip
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date() -> None:
    before = datetime.now()
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert shown in {f"{moment:%Y-%m-%d}" for moment in (before, datetime.now())}


def test_thinking_is_defined_only_when_chosen() -> None:
    source = "{{ enable_thinking if enable_thinking is defined else 'undefined' }}"
    assert [render(source, enable_thinking=choice) for choice in (None, True, False)] == [
        "undefined",
        "True",
        "False",
    ]
    assert render("{{ add_generation_prompt }}", add_generation_prompt=True) == "True"


def test_reasoning_is_there_by_both_names() -> None:
    message: Message = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", [message]) == "bb"
    assert render("{{ messages[0].thinking is defined }}") == "False"


def test_the_conversation_is_not_changed() -> None:
    message: Message = {"role": "user", "content": "a"}
    with pytest.raises(ModelError):
        render("{{ messages[0].update({'content': 'b'}) }}", [message])
    with pytest.raises(ModelError):
        render("{{ messages.append(1) }}", [message])
    assert message == {"role": "user", "content": "a"}


def test_control_characters_and_unicode_pass_through() -> None:
    text = "\x1b[31m \x00 \r\n <b>&amp;</b> {{ x }} {% raw %} é漢😀"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must\nalternate!') }}", "Roles must alternate!"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_failures_are_one_line(source: str, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        render(source)
    message = str(caught.value)
    assert message.startswith("The model's chat template cannot render this conversation: ")
    assert re.search(re.escape(reason), message)
    assert "\n" not in message


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% endfor %}", "{{ x | nofilter }}", "{{ " + "(" * 5000]
)
def test_templates_that_are_not_valid(source: str) -> None:
    with pytest.raises(ModelError, match="chat template is not valid") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'__class__': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ ['{0.__class__}'] | map('format', 1) | first }}",
        "{{ messages | map(attribute='__class__') | list | string }}",
        "{{ environment.globals }}",
        "{{ environment.deadline }}",
        "{{ counted(messages) }}",
        "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func }}",
        "{{ (messages | batch(1)).gi_frame }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages.clear() }}",
    ],
)
def test_nothing_reaches_out_of_the_sandbox(source: str) -> None:
    # Where Jinja gives an undefined value or plain text instead of an error, nothing of Python's may show.
    shown = rendered_or_refused(source)
    assert "<" not in shown
    assert "environment" not in shown


def growing(start: str, step: str, end: str = "") -> str:
    """A template that puts `step`, which may use ns.s, into ns.s sixty times."""
    loop = "{% for i in range(60) %}" + step + "{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop + end


def setting(value: str) -> str:
    return "{% set ns.s = " + value + " %}"


NESTED = setting("[ns.s, ns.s]")
CALLS_ITSELF_TWICE = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
)
RUNAWAY = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with filters": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 400,
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "macro that calls itself twice": CALLS_ITSELF_TWICE,
    "recursive loop": "{% set x = [1, 1] %}{% for i in [x, x] recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}",
    "range": "{{ range(10 ** 12) | list }}",
    "text times number": "{{ ('x' * 10 ** 10) | length }}",
    "number times text": "{{ (10 ** 10 * 'x') | length }}",
    "list times number": "{{ ([0] * 10 ** 10) | length }}",
    "times again and again": growing("'xxxxxxxxxx'", setting("ns.s * 10")),
    "power": "{{ 10 ** 10 ** 10 }}",
    "powers": "{{ ((((9 ** 99) ** 99) ** 99) ** 99) ** 99 }}",
    "product of numbers": growing("3", setting("ns.s * ns.s")),
    "doubling by +": growing("'xx'", setting("ns.s + ns.s")),
    "doubling by ~": growing("'xx'", setting("ns.s ~ ns.s")),
    "doubling by join": growing("'xx'", setting("[ns.s, ns.s] | join")),
    "doubling by format": growing("'xx'", setting("'%s%s' % (ns.s, ns.s)")),
    "doubling by named format": growing("'xx'", setting("'%(a)s%(a)s' % {'a': ns.s}")),
    "doubling by format()": growing("'xx'", setting("'{0}{0}'.format(ns.s)")),
    "doubling by replace": growing("'xx'", setting("ns.s | replace('x', 'xx')")),
    "doubling by replace()": growing("'xx'", setting("ns.s.replace('x', 'xx')")),
    "squaring by join()": growing("'xxxxxxxxxx'", setting("ns.s.join(ns.s)")),
    "doubling by a block": growing("'xx'", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}" + setting("t")),
    "doubling by a macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + growing("'xx'", setting("f(ns.s)")),
    "doubling a list": growing("[1, 2]", setting("ns.s + ns.s")),
    "nested lists as text": growing("['x']", NESTED, "{{ ns.s }}"),
    "nested lists as JSON": growing("['x']", NESTED, "{{ ns.s | tojson }}"),
    "nested lists by ~": growing("['x']", NESTED, "{{ ns.s ~ '' }}"),
    "nested lists by string": growing("['x']", NESTED, "{{ ns.s | string }}"),
    "nested lists by %": growing("['x']", NESTED, "{{ '%s' % (ns.s,) }}"),
    "center": "{{ 'x' | center(10 ** 10) }}",
    "center()": "{{ 'x'.center(10 ** 10) }}",
    "ljust()": "{{ 'x'.ljust(10 ** 10) | length }}",
    "zfill()": "{{ 'x'.zfill(10 ** 10) | length }}",
    "expandtabs()": "{{ '\t'.expandtabs(10 ** 9) | length }}",
    "indent": "{{ 'x\nx' | indent(10 ** 10) }}",
    "JSON indent": "{{ [1] | tojson(indent=10 ** 10) }}",
    "old-style width": "{{ '%10000000000d' % 1 }}",
    "old-style star": "{{ '%*d' % (10 ** 10, 1) }}",
    "new-style width": "{{ '{:>10000000000}'.format('x') }}",
    "new-style nested width": "{{ '{:>{}}'.format('x', 10 ** 10) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "batch fill": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "map with a width": "{{ ['x'] | map('center', 10 ** 10) | list }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}" * 20,
    "int of digits": "{{ ('9' * 9999999) | int }}",
}  # fmt: skip


@pytest.mark.parametrize("source", RUNAWAY.values(), ids=RUNAWAY)
def test_runaway_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    assert len(rendered_or_refused(source)) < 1_000_000
    assert time.monotonic() - start < 4


def test_a_long_conversation_is_no_runaway() -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    messages: list[Message] = [{"role": "user", "content": "word " * 1000}] * 2000
    template = ChatTemplate(source, {})
    start = time.monotonic()
    shown = template.render(messages, add_generation_prompt=False)
    assert time.monotonic() - start < 1
    assert len(shown) == 2000 * (5000 + len("<|im_start|>user\n<|im_end|>\n"))


def test_rendering_from_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(100):
            if (
                template.render([{"role": "user", "content": name}] * 3, add_generation_prompt=False)
                != name * 3
            ):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_template_without_an_end_is_cut_at_the_largest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SIZE", 1000)
    assert len(render("{{ 'x' * 1000 }}")) == 1000
    with pytest.raises(ModelError, match="too large"):
        render("{{ 'x' * 1001 }}")
    with pytest.raises(ModelError, match="too large"):
        render("{{ 'x' * 600 }}{{ 'x' * 600 }}")


def test_without_a_template() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.render(HELLO, add_generation_prompt=True)
