"""`run --parallel` and `-n`: the order of the prompts, labels, errors of one, what goes to which stream."""

import io
import json
import threading

import pytest

from chatterm.backends.backend import EngineError, FinishReason, Request
from chatterm.cli.main import call
from chatterm.cli.parallel import answer_all
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.chatterm.test_oneshot import Terminal


def asked(backend: ScriptedBackend) -> list[Request]:
    return [what for name, what in backend.calls if name == "answer" and isinstance(what, Request)]


def test_answers_stand_in_the_order_of_the_prompts() -> None:
    gate = threading.Event()

    class Late(ScriptedBackend):
        def answers(self, requests):  # type: ignore[no-untyped-def]
            for index, part in super().answers(requests):
                if index == 1 and getattr(part, "finish_reason", None) is not None:
                    gate.set()
                yield index, part

    backend = Late([Script("slow one", gate=gate, gate_after=1), Script("quick one")])
    out, err = io.StringIO(), io.StringIO()
    assert answer_all(backend, ["first?", "second?"], out=out, err=err) == 0
    assert out.getvalue() == "==> first? <==\nslow one\n\n==> second? <==\nquick one\n"
    assert err.getvalue() == ""
    assert backend.closed


def test_one_answer_has_no_label() -> None:
    out = io.StringIO()
    assert answer_all(ScriptedBackend([Script("yes")]), ["q"], out=out, err=io.StringIO()) == 0
    assert out.getvalue() == "yes\n"


def test_several_answers_to_a_prompt_have_seeds_that_count_on() -> None:
    backend = ScriptedBackend([Script(f"answer {n}") for n in range(6)])
    out = io.StringIO()
    answer_all(backend, ["a", "b"], 3, seed=7, out=out, err=io.StringIO())
    assert [request.sampling for request in asked(backend)] == [{"seed": 7 + n} for n in (0, 1, 2)] * 2
    labels = [line for line in out.getvalue().splitlines() if line.startswith("==>")]
    assert labels == [f"==> {name} ({n} of 3) <==" for name in "ab" for n in (1, 2, 3)]
    out = io.StringIO()
    answer_all(ScriptedBackend([Script("x")]), ["a"], 2, out=out, err=io.StringIO())
    assert out.getvalue() == "==> 1 of 2 <==\nx\n\n==> 2 of 2 <==\nx\n"


def test_what_is_wrong_with_one_is_said_in_its_place() -> None:
    bad = Script("never", error=EngineError("no\x1b[2J room"))
    backend = ScriptedBackend([Script("one"), bad, Script("three", finish_reason=FinishReason.LENGTH)])
    out, err = io.StringIO(), io.StringIO()
    assert answer_all(backend, ["a", "b", "c"], stats=True, out=out, err=err) == 1
    assert out.getvalue() == "==> a <==\none\n\n==> b <==\n\n==> c <==\nthree\n"
    assert "chatterm: b: no room\n" in err.getvalue()
    assert "chatterm: 1 answer ends at the token limit (--max-tokens).\n" in err.getvalue()
    assert "[3 answers | " in err.getvalue()


def test_json_has_an_object_for_each_even_where_there_is_no_answer() -> None:
    bad = Script("never", error=EngineError("no room"))
    out = io.StringIO()
    code = answer_all(
        ScriptedBackend([Script("one", "hm"), bad]), ["a\n", "b"], as_json=True, out=out, err=io.StringIO()
    )
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert code == 1
    assert (first["prompt"], first["number"], first["text"], first["reasoning"]) == ("a\n", 1, "one", "hm")
    assert second == {"prompt": "b", "number": 1, "error": "no room"}


def test_an_interrupt_keeps_what_was_written() -> None:
    class Interrupted(ScriptedBackend):
        def answers(self, requests):  # type: ignore[no-untyped-def]
            for number, part in enumerate(super().answers(requests)):
                if number == 4:
                    raise KeyboardInterrupt
                yield part

    backend, out = Interrupted([Script("one two three")]), io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        answer_all(backend, ["a"], out=out, err=io.StringIO())
    assert out.getvalue().startswith("one ")
    assert backend.closed


def test_progress_is_shown_where_answers_go_elsewhere() -> None:
    err = Terminal()
    backend = ScriptedBackend([Script("word " * 60, tokens_per_s=100.0)] * 2)
    answer_all(backend, ["a", "b"], out=io.StringIO(), err=err)
    assert "of 2 answers" in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-p a -n 0", "-n"),
        ("-p a -n two", "-n"),
        ("-p a --parallel --inline", "--inline"),
        ("-p a --parallel --save", "--save"),
        ("-p a --parallel --continue", "--continue"),
        ("-p a -n 2 --session x", "--session"),
        ("-p a -p b -n 2", "--parallel"),
        ("--parallel", "-p TEXT"),
        ("-n 3", "-p TEXT"),
        ("-p a -n 2 --seed 9223372036854775807", "seed"),
    ],
)
def test_what_makes_no_sense(
    line: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    assert call(["run", "m", *line.split()]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_what_is_piped_stands_before_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ScriptedBackend([Script("x")])
    monkeypatch.setattr("chatterm.backends.local.LocalBackend", lambda model, options: backend)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the text\n")))
    assert call(["run", "m", "-p", "one", "-p", "two", "--parallel"]) == 0
    assert [request.messages[0].content for request in asked(backend)] == [
        "the text\n\none",
        "the text\n\ntwo",
    ]
    assert "==> one <==" in capsys.readouterr().out
