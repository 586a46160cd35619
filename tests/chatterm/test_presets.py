"""Presets and prompts of a person's own: files beside the settings, switched to, saved, filled in, never believed."""

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.cli.main import call
from chatterm.commands.completing import choice_completions, completions, path_start
from chatterm.commands.registry import find
from chatterm.commands.reports import help_lines
from chatterm.markdown.lines import line_text
from chatterm.settings.presets import SavedPreset, load_preset, parse_preset, preset_names, save_preset
from chatterm.settings.prompts import filled_in, prompt_files, prompt_text
from chatterm.settings.settings import SettingsError
from chatterm.settings.themes import load_theme
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import patience

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=20).filter(
    str.strip
)


@pytest.fixture
def folder(own_folders: Path) -> Path:
    for name in ("presets", "prompts"):
        (own_folders / name).mkdir(exist_ok=True)
    return own_folders


@given(TEXT, TEXT, st.sampled_from(["on", "off", "auto"]), st.floats(0, 2), st.lists(TEXT, max_size=2))
def test_what_is_saved_is_what_is_loaded(
    model: str, system: str, think: str, heat: float, stop: list[str]
) -> None:
    sampling = {"temperature": heat, "top_k": 3} | ({"stop": tuple(stop)} if stop else {})
    for tools in (None, (), ("read", "search", "files")):
        preset = SavedPreset(model, system, think, tools, sampling)  # type: ignore[arg-type]
        save_preset("mine", preset, replace=True)
        assert load_preset("mine") == preset


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("modle = 'x'", "line 1: unknown setting modle; did you mean model?"),
        ("model = 3", "line 1: model is 3"),
        (
            "model = 'x'\n[sampling]\ntemprature = 1",
            "line 3: unknown setting temprature; did you mean temperature?",
        ),
        ("[sampling]\ntop_p = 7", "line 2: top_p"),
        ("sampling = 1", "[sampling]"),
        ("think = 'maybe'", '"auto", "on", "off"'),
        ("tools = 'read'", "line 1: tools must be a list"),
        ("think = 'on'\ntools = ['a b']", "line 2: tools must be a list"),
        ("= 1", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(source: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_preset(source, Path("mine.toml"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_file_is_refused_and_not_waited_for(folder: Path) -> None:
    themes = folder / "themes"
    themes.mkdir(exist_ok=True)
    for path in (folder / "prompts" / "pipe.md", folder / "presets" / "pipe.toml", themes / "pipe.toml"):
        os.mkfifo(path)
    with patience():
        assert [(file.name, file.about) for file in prompt_files()] == [("pipe", "")]
        for load in (load_preset, load_theme, lambda name: prompt_text(folder / "prompts" / f"{name}.md")):
            with pytest.raises(SettingsError, match=r"pipe\.\w+ is not a regular file"):
                load("pipe")


async def test_a_preset_is_saved_listed_and_switched_to(folder: Path) -> None:
    (folder / "presets" / "terse.toml").write_text(
        'model = "other"\nsystem = "Be terse."\n[sampling]\ntop_k = 7\n'
    )
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("hello")
        await driver.send("/preset terse", wait=False)
        await driver.until(lambda: backend.model == "other")
        await driver.idle()
        assert (backend.system, dict(backend.sampling)) == ("Be terse.", {"top_k": 7})
        assert driver.questions == ["hello"]
        await driver.send("/preset save mine")
        await driver.until(lambda: preset_names() == ["mine", "terse"])
        assert load_preset("mine") == SavedPreset("other", "Be terse.", "auto", None, {"top_k": 7})
        await driver.send("/preset save mine")
        await driver.until(lambda: any("/preset replace mine" in text for text in driver.errors))
        await driver.send("/preset tersse")
        await driver.until(lambda: any("did you mean terse?" in text for text in driver.errors))
        await driver.send("/preset", wait=False)
        await driver.shows("top_k 7")


async def test_a_preset_with_another_model_asks_before_it_ends_an_answer(folder: Path) -> None:
    (folder / "presets" / "terse.toml").write_text('model = "other"\nsystem = "Be terse."\n')
    backend = ScriptedBackend([Script("A whole answer.", gate=threading.Event(), gate_after=1)])
    async with driven(backend) as driver:
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.answers == ["A wh"])
        await driver.send("/preset terse", wait=False)
        await driver.shows("Stop the answer and switch to other?")
        await driver.pilot.press("n")
        await driver.send("/preset terse", wait=False)
        await driver.shows("Stop the answer and switch to other?")
        assert (backend.model, backend.system) != ("other", "Be terse.")
        await driver.pilot.press("y")
        await driver.shows("Now chatting with other")
        assert driver.errors == []


async def test_tools_of_a_preset_are_switched_on_and_saved(folder: Path) -> None:
    (folder / "presets" / "reader.toml").write_text('tools = ["read", "patch_file"]\n')
    (folder / "presets" / "bare.toml").write_text("tools = []\n")
    (folder / "presets" / "wrong.toml").write_text('tools = ["reed"]\n')
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        box = driver.app.chat.tooling.session.box

        async def use(name: str, *on: str) -> None:
            await driver.send(f"/preset {name}")
            await driver.until(lambda: backend.calls[-1] == ("set_tools", on))
            await driver.idle()
            assert box.on == set(on)

        await use("reader", "read_file", "list_folder", "patch_file")
        assert "You are asked before each call" in driver.notices[-1]
        await driver.send("/preset save mine")
        await driver.until(lambda: "mine" in preset_names())
        assert load_preset("mine").tools == ("read", "patch_file")
        await use("bare")
        await use("mine", "read_file", "list_folder", "patch_file")
        await driver.send("/preset wrong")
        await driver.until(lambda: any("There is no tool 'reed'" in text for text in driver.errors))


async def test_tools_of_a_preset_wait_for_its_model(folder: Path) -> None:
    """What the present model knows does not count."""
    (folder / "presets" / "caller.toml").write_text('model = "caller"\ntools = ["search"]\n')
    backend = ScriptedBackend(calls_tools=False)
    backend.on_switch = lambda _: setattr(backend, "calls_tools", True)
    async with driven(backend) as driver:
        await driver.send("/tools search")
        assert "does not support tools" in driver.errors[-1]
        await driver.send("/preset caller", wait=False)
        await driver.until(lambda: ("set_tools", ("search",)) in backend.calls)
        assert ("switch", "caller") in backend.calls


def test_a_preset_on_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "presets" / "terse.toml").write_text(
        'model = "m"\nsystem = "Be terse."\n[sampling]\ntop_k = 7\nseed = 1\n'
    )
    made: list[tuple[str, Any]] = []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))

    def local(model: str, options: object) -> ScriptedBackend:
        made.append((model, options))
        return ScriptedBackend([Script("yes")])

    monkeypatch.setattr("chatterm.backends.local.LocalBackend", local)
    assert call(["run", "--preset", "terse", "--seed", "5", "-p", "hello"]) == 0
    (model, options), *_ = made
    assert (model, options.system, dict(options.sampling)) == ("m", "Be terse.", {"top_k": 7, "seed": 5})
    (folder / "presets" / "reader.toml").write_text('model = "m"\ntools = ["read"]\n')
    (folder / "presets" / "writer.toml").write_text('model = "m"\ntools = ["write"]\n')
    backend = ScriptedBackend([Script("yes")])
    monkeypatch.setattr("chatterm.backends.local.LocalBackend", lambda *_: backend)
    assert call(["run", "--preset", "reader", "-p", "hello"]) == 0
    assert ("set_tools", ("read_file", "list_folder")) in backend.calls
    assert call(["run", "--preset", "reader", "--tools", "search", "-p", "hello"]) == 0
    assert backend.calls[-2:] == [("set_tools", ("search",)), ("send", "hello")]
    capsys.readouterr()
    assert call(["run", "--preset", "writer", "-p", "hello"]) == 2
    assert "write may change things; add --allow-changes" in capsys.readouterr().err
    assert call(["run", "--preset", "writer", "--allow-changes", "-p", "hello"]) == 0
    assert call(["run", "--preset", "writer", "--inline", "-p", "hello"]) == 0
    assert "The model may ask to use: write_file, patch_file." in capsys.readouterr().out
    assert call(["run", "--preset", "nothing", "-p", "hello"]) == 1
    assert "There is no preset" in capsys.readouterr().err


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_prompt_takes_any_argument_or_says_in_a_line_what_it_needs(text: str, argument: str) -> None:
    try:
        said = ""
        filled_in("mine", text, argument)
    except SettingsError as error:
        said = str(error)
    assert not said or (said.startswith("/mine needs") and "\n" not in said)


def test_words_files_and_dollars_are_filled_in_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled_in("p", "a $1 b $2 c $* $$1", "$2 'x y'") == "a $2 b x y c $2 'x y' $1"
    (folder / "my file.py").touch()
    monkeypatch.chdir(folder)
    assert filled_in("p", "Review $FILE", "'my file.py'") == 'Review @"my file.py"'
    assert filled_in("p", "Review $FILE", "https://x.org/a") == "Review @https://x.org/a"
    assert filled_in("p", "Review $FILE", "docs:note") == "Review @docs:note"
    for missing in ("my", "a\0b", "x" * 5_000, "~nobody/x"):
        with pytest.raises(SettingsError, match="there is no"):
            filled_in("p", "Review $FILE", missing)
    assert filled_in("p", "Translate this:", "hello") == "Translate this:\n\nhello"
    with pytest.raises(SettingsError, match="name of a file"):
        filled_in("p", "Review $FILE", "")


async def test_prompts_are_commands_that_complete_and_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "prompts" / "review.md").write_text("# Look at a file\n\nReview $FILE")
    (folder / "prompts" / "help.md").write_text("mine")
    (folder / "prompts" / "Bad name.md").write_text("x")
    (folder / "notes.md").write_text("what I wrote")
    monkeypatch.chdir(folder)
    assert [file.name for file in prompt_files()] == ["help", "review"]
    command = find("review")
    assert command is not None
    assert [name for name, _ in completions("/rev")] == ["review"]
    assert path_start("/review no") == 8
    assert choice_completions("/review x") == []
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.until(lambda: "/help is a command of chatterm" in " ".join(driver.text().split()))
        await driver.send("/review notes.md")
        await driver.until(lambda: driver.answers)
        sent = next(text for name, text in backend.calls if name == "send")
        assert sent == "# Look at a file\n\nReview notes.md\n\nnotes.md:\n```md\nwhat I wrote\n```"
        assert "/review FILE" in "\n".join(map(line_text, help_lines(80)))
