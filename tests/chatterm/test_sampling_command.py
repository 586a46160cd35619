"""/set: what it takes, what it says, where a value comes from, and that it reaches the next answer and the session."""

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from chatterm.backends.backend import EngineError, ModelInfo
from chatterm.cli import requests
from chatterm.cli.inline.chat import Inline, LineInput
from chatterm.cli.main import app
from chatterm.commands import sampling
from chatterm.commands.completing import choice_completions
from chatterm.commands.reports import sampling_lines
from chatterm.commands.sampling import NAMES, answer_to, in_force, suggested, with_choice
from chatterm.conversation.headless import Talk
from chatterm.markdown.lines import line_cells
from chatterm.sessions.store import SessionStore
from chatterm.settings.settings import SamplingSettings, Settings
from engine.params import SamplingParams
from tests.chatterm.driving import driven
from tests.chatterm.scripted import ScriptedBackend
from tests.fresh import examples

INFO = ModelInfo("m", "cpu", "float32", 4096, False, {"temperature": 0.6, "top_k": 20})
NONE = SamplingSettings()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature 0.2", "temperature", 0.2),
        ("temperature=1", "temperature", 1.0),
        ("TOP-K  5", "top_k", 5),
        ("--max-tokens 100", "max_tokens", 100),
        ("stop 'a b' c=d", "stop", ("a b", "c=d")),
        ("seed 7", "seed", 7),
    ],
)
def test_a_value_is_chosen(text: str, name: str, value: object) -> None:
    assert with_choice({"min_p": 0.1}, text) == (name, {"min_p": 0.1, name: value})


def test_default_takes_it_back() -> None:
    assert with_choice({"seed": 1, "top_k": 3}, "seed none") == ("seed", {"top_k": 3})
    assert with_choice({"seed": 1}, "top_k default") == ("top_k", {"seed": 1})
    assert with_choice({"seed": 1}, "default") == ("", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature 1", "Unknown sampling setting temprature; did you mean temperature?"),
        ("xyzzy 1", "Unknown sampling setting xyzzy; choose one of: temperature, "),
        ("temperature hot", "temperature is 'hot'; it must be a number."),
        ("temperature -1", "temperature is -1.0; it must be 0 (greedy) or more."),
        ("temperature inf", "temperature is inf; it must be a finite number, 0 (greedy) or more."),
        ("temperature 1e400", "temperature is inf; it must be a finite number, 0 (greedy) or more."),
        ("temperature nan", "temperature is nan; it must be a finite number, 0 (greedy) or more."),
        ("temperature -inf", "temperature is -inf; it must be 0 (greedy) or more."),
        ("top_k 0.5", "top_k is '0.5'; it must be a whole number."),
        ("top_p 0", "top_p is 0.0; it must be above 0 and at most 1."),
        ("stop 'a", "A quotation mark is not closed"),
    ],
)
def test_what_cannot_be_gets_one_line(text: str, said: str) -> None:
    with pytest.raises(EngineError) as error:
        with_choice({}, text)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "-1e400", "Infinity"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("stop", "speculation")])
def test_no_setting_is_infinite(name: str, value: str) -> None:
    chosen = {"top_k": 3}
    with pytest.raises(EngineError, match=f"^{name} is .*; it must be .*[.]$"):
        answer_to(f"{name} {value}", chosen, NONE, INFO)
    assert chosen == {"top_k": 3}


@examples(100)
@given(st.sampled_from([*NAMES, "default", "x"]), st.text(max_size=20))
def test_whatever_is_typed_is_refused_in_one_line_or_can_be_sampled_with(name: str, rest: str) -> None:
    refused, chosen, lines = "", None, [""]
    try:
        chosen, lines = answer_to(f"{name} {rest}".strip(), {"top_k": 3}, NONE, INFO)
    except EngineError as error:
        refused = str(error)
    assert refused.isprintable()
    assert len(lines) == 1
    SamplingParams(**(chosen or {}))


def test_each_value_says_where_it_comes_from() -> None:
    found = in_force({"seed": 3}, SamplingSettings(top_k=9, seed=1), INFO)
    assert {name: (f.value, f.source) for name, f in found.items()} == {
        "temperature": (0.6, "the model"),
        "top_k": (9, "settings file"),
        "top_p": (1.0, ""),
        "min_p": (0.0, ""),
        "repetition_penalty": (1.0, ""),
        "presence_penalty": (0.0, ""),
        "frequency_penalty": (0.0, ""),
        "max_tokens": (None, ""),
        "seed": (3, "this conversation"),
        "stop": ((), ""),
        "stop_repetition": (True, "chatterm"),
        "speculation": ("auto", "chatterm"),
    }
    there = ModelInfo("m", "a server", "", 0, False, is_remote=True)
    assert in_force({}, NONE, there)["speculation"].source == ""
    sent = in_force({"top_k": 5}, SamplingSettings(seed=1), there)
    assert [(sent[name].value, sent[name].source) for name in ("temperature", "top_k", "top_p", "seed")] == [
        (None, "the server's default"),
        (5, "this conversation"),
        (None, "the server's default"),
        (1, "settings file"),
    ], "a server is sent only what was chosen; what it takes else is not known here"
    assert answer_to("temperature", {}, NONE, there)[1][0].startswith("temperature: the server's default. ")
    assert answer_to("top_p none", {"top_p": 0.5}, NONE, there)[1] == [
        "top_p is the server's default from the next answer on."
    ]
    silent = ModelInfo("m", "cpu", "float32", 4096, False)
    assert in_force({}, NONE, silent)["top_p"].source == "chatterm"


def test_what_is_said() -> None:
    file = SamplingSettings(temperature=0.9)
    assert answer_to("temperature 0.2", {}, file, INFO)[1] == ["temperature is 0.2 from the next answer on."]
    assert answer_to("temperature default", {"temperature": 1.0}, file, INFO)[1] == [
        "temperature is 0.9 again (from the settings file), from the next answer on."
    ]
    assert answer_to("top_k none", {"top_k": 1}, file, INFO)[1] == [
        "top_k is 20 again (as the model's authors recommend), from the next answer on."
    ]
    assert answer_to("seed none", {"seed": 1}, file, INFO)[1] == [
        "seed is no longer set, from the next answer on."
    ]
    chosen, lines = answer_to("top_k", {}, file, INFO)
    assert chosen is None
    assert lines[0].startswith("top_k: 20 (the model). ")


@pytest.mark.parametrize("width", [30, 63, 64, 88, 89, 110])
def test_the_list_fits(width: int) -> None:
    lines = sampling_lines(in_force({"stop": ("end of it all",)}, NONE, INFO).values(), width)
    assert all(line_cells(line) <= width for line in lines)
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert all(name in text for name in NAMES)


def test_completion_goes_from_names_to_values() -> None:
    assert choice_completions("/set temp") == ["/set temperature "]
    assert "/set temperature default" in choice_completions("/set temperature ")
    assert choice_completions("/set temperature 0.") == ["/set temperature 0.3", "/set temperature 0.7"]
    assert choice_completions("/set temperature 0.3") == []


async def test_it_holds_from_the_next_answer_on_and_in_the_session(tmp_path: Path) -> None:
    store, backend = SessionStore.open(tmp_path / "sessions.db"), ScriptedBackend()
    async with driven(backend, store=store) as driver:
        driver.app.chat.settings = Settings(sampling=SamplingSettings(top_k=9))
        await driver.send("hello")
        session = driver.app.chat.conversation.saved.session
        assert session is not None
        await driver.send("/set temperature 0.2")
        await driver.until(lambda: backend.sampling == {"top_k": 9, "temperature": 0.2})
        await driver.until(lambda: store.load(session)[0].sampling == {"temperature": 0.2})
        await driver.send("/set temperature 99999999999999999999999e999")
        assert "it must be" in driver.errors[-1]
        await driver.pilot.press("f9")
        await driver.shows("/set NAME VALUE")
        await driver.pilot.press("f9")
        await driver.send("/reset")
        await driver.send("/set default")
        await driver.until(lambda: backend.sampling == {"top_k": 9})
        assert store.load(session)[0].sampling == {"temperature": 0.2}
        await driver.send(f"/sessions {session}")
        await driver.until(lambda: backend.sampling == {"top_k": 9, "temperature": 0.2})
        await driver.shows("Sampling  temperature 0.2")
    store.close()


def inline(tmp_path: Path, text: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    store, backend, out = SessionStore.open(tmp_path / "sessions.db"), ScriptedBackend(), io.StringIO()
    try:
        talk = Talk(backend, store, sampling={"seed": 3})
        lines = LineInput(io.BytesIO(text.encode()), by_hand=False)
        preferences = Settings(sampling=SamplingSettings(top_k=9))
        Inline(backend, talk, lines=lines, out=out, err=out, settings=preferences).run()
        saved = store.load(talk.saved.session)[0].sampling if talk.saved.session is not None else {}
        return out.getvalue(), dict(backend.sampling), saved
    finally:
        store.close()


def test_without_a_screen(tmp_path: Path) -> None:
    text, sampling, saved = inline(tmp_path, "hello\n/set\n/set min_p 0.1\n/set top_p x\n/cache why\n")
    assert "seed: 3 (this conversation)" in text
    assert "top_k: 9 (settings file)" in text
    assert "min_p is 0.1 from the next answer on." in text
    assert "top_p is 'x'; it must be a number." in text
    assert "What each turn found in the cache" in text
    assert "You waited for 10 of 10 prompt tokens." in text
    assert sampling == {"top_k": 9, "seed": 3, "min_p": 0.1}
    assert saved == {"seed": 3, "min_p": 0.1}
    text, _, _ = inline(tmp_path, "/reset\n")
    assert "A new conversation. It keeps seed 3." in text


def test_each_setting_can_be_given_in_every_way() -> None:
    """There is one list of them: the settings; the engine knows each, and so do the commands and a batch."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(NAMES) <= {part.name for part in fields(SamplingParams)}
    for command in ("run", "batch"):
        assert set(NAMES) <= {param.name for param in commands[command].params}
    assert {*NAMES} <= {*requests._FIELDS}
    assert {name.split()[0] for name in suggested() if name.endswith("default")} == {*NAMES, "default"}
    assert {*sampling._OFFERED} == {*NAMES} - {"stop"}
    documented = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text()
    assert all(f"`{name}`" in documented for name in NAMES)
