"""Chat templates: features that Hugging Face templates use work; escapes from the sandbox and runaways do not."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from models.errors import ModelError
from models.text import chat_template
from models.text.chat_template import ChatTemplate, Message
from models.text.template_sandbox import answer
from tests.counting import PATIENCE, until
from tests.models.tokenizer_data import tiny_tokenizer

ROOT = Path(__file__).parents[2]
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


class Here(ChatTemplate):
    """Renders in this process, with the same code but without limits, to save the time of starting a process."""

    def _ask(self, request: bytes) -> dict[str, Any]:
        return dict(answer(self._source, json.loads(request), {}))


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[Message] | None = None, *, here: bool = True, **options: Any) -> str:
    template = (Here if here else ChatTemplate)(source, NAMES)
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
        render(source)
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
        "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func }}",
        "{{ (messages | batch(1)).gi_frame }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages.clear() }}",
    ],
)
def test_nothing_reaches_out_of_the_sandbox(source: str) -> None:
    # Where Jinja gives an undefined value or plain text instead of an error, no Python object may show.
    shown = rendered_or_refused(source)
    assert "<" not in shown
    assert "environment" not in shown


def growing(start: str, step: str, end: str = "") -> str:
    """Return a template that assigns `step`, which may use ns.s, to ns.s sixty times, and then writes `end`."""
    loop = "{% for i in range(60) %}{% set ns.s = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop + end


NESTED = growing("['x']", "[ns.s, ns.s]")
"""ns.s is a list of the same two lists, each of the same two lists..."""
TWICE = NESTED + "{% set one = ns.s %}" + NESTED
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
TOO_LONG = {
    "nested loops": LOOP + "{% endfor %}{% endfor %}",
    "macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "nested lists that are equal": TWICE + "{{ one == ns.s }}",
    "nested lists in a list": TWICE + "{{ one in [ns.s] }}",
    "nested lists that are ordered": TWICE + "{{ one < ns.s }}",
    "nested lists among unique ones": TWICE + "{{ [one, ns.s] | map('string') | unique | list }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product of numbers": growing("3", "ns.s * ns.s"),
    "digits of a number": "{{ (10 ** 9999999) | string }}",
    "power while it is compiled": "{% set x = 9 ** (9 ** 9) %}",
    "pattern": "{{ ('www.' * 200000) | urlize }}" * 50,
}  # fmt: skip
TOO_LARGE = {
    "output": LOOP + "xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "output at once": "{{ 'x' * 20000000 }}",
    "ranges": "{{ ([range(99999)] * 9999) | map('list') | list | length }}",
    "text times number": "{{ ('x' * 10 ** 10) | length }}",
    "bytes times number": "{{ ('x'.encode() * 10 ** 10) | length }}",
    "list times number": "{{ ([0] * 10 ** 10) | length }}",
    "doubling by +": growing("'xx'", "ns.s + ns.s"),
    "doubling by ~": growing("'xx'", "ns.s ~ ns.s"),
    "doubling by join": growing("'xx'", "[ns.s, ns.s] | join"),
    "doubling bytes": growing("'xx'.encode()", "ns.s + ns.s"),
    "doubling a list": growing("[1, 2]", "ns.s + ns.s"),
    "squaring by replace()": growing("'xx'", "ns.s.replace('x', ns.s)"),
    "nested lists as text": NESTED + "{{ ns.s }}",
    "nested lists as JSON": NESTED + "{{ ns.s | tojson }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "old-style width": "{{ '%1000000000d' % 1 }}",
    "new-style width": "{{ '{:>10000000000}'.format('x') }}",
}  # fmt: skip


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.15)
    monkeypatch.setattr(chat_template, "MEMORY", 100 * 2**20)


@pytest.mark.parametrize("source", [*TOO_LONG.values(), *TOO_LARGE.values()], ids=[*TOO_LONG, *TOO_LARGE])
@pytest.mark.usefixtures("low_limits")
def test_runaway_templates_are_stopped(source: str) -> None:
    """Either limit, time or memory, may act first on this machine; without them, the test would hang."""
    with pytest.raises(ModelError, match=r"it takes too long|it produces too much text|Exceeds the limit"):
        render(source, here=False)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may not bound the memory")
def test_the_memory_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    template = ChatTemplate("{{ ('x'.encode() * messages[0].content | int) | length }}", {})
    for size, fits in ((10**6, True), (10**9, False), (10**6, True), (3 * 10**9, False), (10**8, True)):
        messages: list[Message] = [{"role": "user", "content": str(size)}]
        if fits:
            assert template.render(messages, add_generation_prompt=False) == str(size)
        else:
            with pytest.raises(ModelError, match="too much text"):
                template.render(messages, add_generation_prompt=False)


def test_a_template_that_hangs_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    template = ChatTemplate(TOO_LONG["nested lists that are equal"], {})
    failed: list[str] = []

    def work() -> None:
        with pytest.raises(ModelError) as caught:
            template.render(HELLO, add_generation_prompt=False)
        failed.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: template._process is not None)
    for _ in range(100):
        sleep(0.0005)  # this thread gets its turns
    assert thread.is_alive()
    template.close()
    thread.join(PATIENCE)
    assert "its process has ended" in failed[0]
    assert template._process.returncode is not None  # type: ignore[union-attr]


def test_a_long_conversation_is_no_runaway() -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    messages: list[Message] = [{"role": "user", "content": "word " * 1000}] * 2000
    shown = ChatTemplate(source, {}).render(messages, add_generation_prompt=False)
    assert len(shown) == 2000 * (5000 + len("<|im_start|>user\n<|im_end|>\n"))


def test_a_hostile_message_is_one_short_line() -> None:
    with pytest.raises(ModelError) as caught:
        render("{{ raise_exception(('\x1b[31m' + 'x' * 999 + '\n') * 999) }}")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


# --- the process


def goes_on(template: ChatTemplate) -> int:
    """Return the id of the process that renders."""
    assert template.render(HELLO, add_generation_prompt=False) == "hello"
    assert template._process is not None
    return template._process.pid


def is_gone(pid: int) -> bool:
    """Return whether no process has this id, not even one that ended and was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_process_renders_until_it_is_closed_and_then_another() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.start()
    first = goes_on(template)
    assert goes_on(template) == first
    template.close()
    template.close()
    assert is_gone(first)
    assert goes_on(template) != first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_was_killed_is_replaced(number: int) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    first = goes_on(template)
    os.kill(first, number)
    until(lambda: template._process is not None and template._process.poll() is not None)
    assert goes_on(template) != first
    assert is_gone(first)


def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    pid = goes_on(template)
    del template
    gc.collect()
    assert is_gone(pid)


PROGRAM = """
import os, signal, sys
from models.text.chat_template import ChatTemplate
template = ChatTemplate("{{ 'x' }}", {})
template.render([], add_generation_prompt=False)
print(template._process.pid, os.getsid(template._process.pid) == template._process.pid, "jinja2" in sys.modules)
sys.stdout.flush()
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_this_program_whatever_ends_that(number: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid, is_apart, has_jinja = done.stdout.split()
    assert (is_apart, has_jinja) == ("True", "False"), "Ctrl+C is not for it; Jinja runs only there"
    state = Path(f"/proc/{pid}/stat")  # the process that adopts it may be slow to reap it
    until(
        lambda: (
            is_gone(int(pid)) or (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
        )
    )


NOISE = """
import sys
from models.text import template_sandbox
def noisy(pattern):
    print("noise")
    print("noise", file=sys.stderr)
    sys.stdout.flush()
    return "quiet"
template_sandbox._strftime_now = noisy
template_sandbox.main(5.0, 2**29)
"""


def test_what_is_printed_is_no_reply() -> None:
    asked = json.dumps("{{ strftime_now('') }}") + "\n{}\n{}\n"
    done = subprocess.run(
        [sys.executable, "-c", NOISE], cwd=ROOT, input=asked, capture_output=True, text=True
    )
    assert done.stdout == '{"text": "quiet"}\n' * 2


def test_where_no_process_can_be_started_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    template = ChatTemplate("{{ 'x' }}", {})
    template.start()
    with pytest.raises(ModelError, match="no process can be started for it \\(No such file"):
        template.render(HELLO, add_generation_prompt=False)


def test_the_limits_hold_without_the_tests_changing_them() -> None:
    assert chat_template.SECONDS <= 5
    assert chat_template.MEMORY <= 2**30


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


def test_a_template_adds_little_to_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "ADDED", 1000)
    source = "{% set what = messages[0].content %}{{ what * 3 if what[0] == 'é' else 'x' * what | int }}"
    template = ChatTemplate(source, {})

    def size(content: str) -> int:
        return len(template.render([{"role": "user", "content": content}], add_generation_prompt=False))

    assert size("1000") == 1000
    assert size("é" * 9999) == 29997
    with pytest.raises(ModelError, match="too much text"):
        size("2000")
    assert size("1000") == 1000


def test_without_a_template() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert not tokenizer.has_chat_template
    goes_on: list[Message] = [*HELLO, {"role": "assistant", "content": ", world"}]
    assert tokenizer.render(goes_on, add_generation_prompt=True) == "hello, world"
    with pytest.raises(ModelError, match="takes no system prompt"):
        tokenizer.render([{"role": "system", "content": "S"}], add_generation_prompt=True)
