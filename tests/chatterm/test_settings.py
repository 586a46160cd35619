"""The settings file: what it may say, what is said where it is wrong, and `chatterm config`."""

import dataclasses
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import ChatOptions
from chatterm.backends.remote.address import Remote
from chatterm.cli.main import call
from chatterm.settings.file import changed, store
from chatterm.settings.paths import config_path, user_themes
from chatterm.settings.reading import load_settings, parse_settings
from chatterm.settings.settings import TABLES, Settings, SettingsError, with_settings
from chatterm.settings.text import described, field_docs
from chatterm.settings.toml import statement_lines

PATH = Path("config.toml")


def parse(source: str) -> Settings:
    return parse_settings(source, PATH)


def test_without_a_file_everything_is_at_its_default(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "none" / "config.toml") == Settings()


def test_a_file_states_what_differs() -> None:
    settings = parse(
        '[screen]\ntheme = "paper"\n[sampling]\ntemperature = 1\nstop = ["a"]\n[sessions]\nsave = false\n'
    )
    assert settings.screen.theme == "paper"
    assert settings.sampling.given() == {"temperature": 1.0, "stop": ("a",)}
    assert type(settings.sampling.temperature) is float
    assert not settings.sessions.save
    assert settings.composer == Settings().composer
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.screen.theme = "snow"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[screen]\n\n# about it\nthem = 1", "line 4: unknown setting screen.them; did you mean theme?"),
        ("[scren]\n", "line 1: unknown setting scren; did you mean screen?"),
        ("\nscreen = 3", "line 2: screen must be a table: write [screen] and its settings below it."),
        ('[screen]\ntheme = "plaid"', "line 2: unknown theme 'plaid'; choose one of: auto, contrast, dusk, "),
        ('screen.panel = "big"', 'line 1: panel is \'big\'; it must be one of "auto", "show", "hide".'),
        ("[composer]\nhistory = true", "line 2: history is true; it must be a whole number."),
        ("[composer]\nhistory = -1", "line 2: history is -1; it must be 0 or more."),
        ("[composer]\nprepare_drafts = 1", "line 2: prepare_drafts is 1; it must be true or false."),
        ("[model]\ncontext = 0", "line 2: context is 0; it must be 1 or more."),
        ("[model]\ntensor_parallel = -1", "line 2: tensor_parallel is -1; it must be a number of GPUs"),
        ("[model]\noffload_gb = -1", "line 2: offload_gb is -1.0; it must be 0 or more."),
        ("[model]\noffload_gb = inf", "line 2: offload_gb is inf; it must be a finite number, 0 or more."),
        (
            "[sampling]\ntemperature = nan",
            "line 2: temperature is nan; it must be a finite number, 0 (greedy)",
        ),
        ("[model]\nthreads = 0", "line 2: threads is 0; it must be 1 or more."),
        ('[sampling]\ntop_k = 4\ntemperature = "hot"', "line 3: temperature is 'hot'; it must be a number."),
        ("[sampling]\ntemperature = -1", "line 2: temperature is -1.0; it must be 0 (greedy) or more."),
        (
            '[sampling]\nstop = "x"',
            'line 2: stop is \'x\'; it must be a list of strings, as in ["one", "two"].',
        ),
        ('[model]\nsystem = """\nthink = 1\n"""\nthink = "x"', "line 5: think is 'x'; it must be one of "),
        ("[sampling]\nstop = [\n  1,\n]", "line 2: stop is [1]; it must be a list of strings"),
        ("[screen]\ntheme = graphite", "line 2: this is not TOML: "),
        ('[model]\nname = "', "line 2: this is not TOML: "),
        (
            "[sampling]\ntemperature = 1" + "0" * 400,
            "line 2: temperature has too many digits; it must be a number.",
        ),
        (
            "[sampling]\nseed = 0x" + "F" * 5000,
            "line 2: seed has too many digits; it must be a whole number.",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(source: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(source)
    assert str(error.value).startswith(f"config.toml, {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["a = " + "[" * 5000, "[sampling]\nseed = " + "9" * 5000])
def test_what_python_itself_refuses_is_one_line_too(source: str) -> None:
    with pytest.raises(
        SettingsError, match=r"config.toml: a number has thousands of digits, or lists are nested"
    ):
        parse(source)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"[model]\nname = 'f\xfcr'\n")
    with pytest.raises(SettingsError, match="line 2: this is not UTF-8"):
        load_settings(path)
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load_settings(tmp_path)


def test_every_field_is_documented() -> None:
    for kind in (*TABLES.values(), Remote):
        assert kind.__doc__
        docs = field_docs(kind)
        for part in dataclasses.fields(kind):
            assert len(docs[part.name]) > 10, part.name


def test_what_is_shown_is_a_settings_file() -> None:
    settings = parse('[screen]\ntheme = "paper"\n[sampling]\ntop_k = 4\n[model]\nsystem = "a \\"b\\""')
    text = described(settings, PATH, exists=True)
    assert parse(text) == settings
    assert '\ntheme = "paper"\n' in text
    assert '\n#panel = "auto"\n' in text


def test_the_lines_of_a_statement() -> None:
    source = '# top\n[a]\nb = """\n[c]\nd = 1\n"""\n\n# about d\n[c]\nd.e = [\n 1\n]\n'
    assert statement_lines(source, ("a",)) == (1, 2)
    assert statement_lines(source, ("a", "b")) == (2, 6)
    assert statement_lines(source, ("c", "d")) == (9, 12)
    assert statement_lines(source, ("d",)) is None


COMMENTED = '# mine\n[screen]  # looks\ntheme = "ember" # warm\n\n[model]\nsystem = """a\nb"""\n'


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("screen", "theme", "snow", COMMENTED.replace('"ember"', '"snow"')),
        ("screen", "theme", None, COMMENTED.replace('theme = "ember" # warm\n', "")),
        ("screen", "panel", "hide", COMMENTED.replace("# looks\n", '# looks\npanel = "hide"\n')),
        ("model", "system", 'x "y"\n', COMMENTED.replace('"""a\nb"""', '"x \\"y\\"\\n"')),
        ("sampling", "stop", ("a", "b"), COMMENTED + '\n[sampling]\nstop = ["a", "b"]\n'),
        ("composer", "history", None, COMMENTED),
    ],
)
def test_one_setting_changes_and_all_else_stays(table: str, key: str, value: object, expected: str) -> None:
    assert changed(COMMENTED, table, key, value, PATH) == expected


@given(st.text(), st.text(alphabet="#=\"'[] \\\n\tab", max_size=20))
def test_any_text_can_be_stored(value: str, comment: str) -> None:
    source = f"[model]\nsystem = 'old' # {comment.splitlines()[0] if comment.split() else ''}\n"
    try:
        value.encode()
        tomllib.loads(source)
    except (UnicodeEncodeError, tomllib.TOMLDecodeError):
        return
    assert tomllib.loads(changed(source, "model", "system", value, PATH)) == {"model": {"system": value}}


def test_what_only_a_person_can_change_stays() -> None:
    with pytest.raises(SettingsError, match="cannot be changed here; use: chatterm config edit"):
        changed('screen = { theme = "snow" }\n', "screen", "theme", "ember", PATH)


def test_the_file_is_replaced_whole_and_a_link_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles" / "config.toml", tmp_path / "config.toml"
    real.parent.mkdir()
    real.write_text("# mine\n", encoding="utf-8")
    real.chmod(0o640)
    link.symlink_to(real)
    store(link, "screen", "theme", "snow")
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == '# mine\n\n[screen]\ntheme = "snow"\n'
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert list(real.parent.iterdir()) == [real]
    with pytest.raises(SettingsError, match="unknown theme 'plaid'"):
        store(link, "screen", "theme", "plaid")
    assert load_settings(link).screen.theme == "snow"


def test_settings_fill_what_was_not_chosen() -> None:
    settings = parse(
        '[model]\nsystem = "terse"\nthink = "off"\ncontext = 100\noffload_gb = 2\nthreads = 3\ntensor_parallel = 0\n'
        "[sampling]\ntop_k = 4\ntemperature = 0.5\n"
    )
    options = with_settings(ChatOptions(think="on", sampling={"top_k": 8}), settings, {"think"})
    assert (options.system, options.think, options.context, options.threads) == ("terse", "on", 100, 3)
    assert (options.offload_gb, options.tensor_parallel) == (2.0, 0)
    assert options.sampling == {"top_k": 8, "temperature": 0.5}


def test_a_file_with_the_former_name_of_a_setting_is_understood() -> None:
    assert parse("[model]\nspill_gb = 2").model.offload_gb == 2.0
    assert parse("[model]\noffload_gb = 3\nspill_gb = 2").model.offload_gb == 3.0


# --- chatterm config ---


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{os.environ['CHATTERM_CONFIG']}\n"
    monkeypatch.delenv("CHATTERM_CONFIG")
    assert config_path().parts[-2:] == ("chatterm", "config.toml")
    assert user_themes() == config_path().parent / "themes"


def test_config_shows_sets_and_takes_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["config"]) == 0
    shown = capsys.readouterr().out
    assert "this file does not exist yet" in shown
    assert "0 always picks the most likely token" in shown
    assert call(["config", "set", "screen.theme", "moss"]) == 0
    assert call(["config", "set", "presence_penalty", "-1"]) == 0
    assert call(["config", "set", "prepare_drafts", "off"]) == 0
    assert call(["config", "set", "stop", "a b", "c"]) == 0
    settings = load_settings(config_path())
    assert settings.screen.theme == "moss"
    assert settings.sampling.presence_penalty == -1.0
    assert settings.sampling.stop == ("a b", "c")
    assert not settings.composer.prepare_drafts
    capsys.readouterr()
    assert call(["config"]) == 0
    assert parse(capsys.readouterr().out) == settings
    assert call(["config", "unset", "theme"]) == 0
    assert load_settings(config_path()).screen == Settings().screen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "screen.theme", "plaid"], "screen.theme: unknown theme 'plaid'; choose one of:"),
        (["set", "sampling.top_p", "much"], "sampling.top_p: top_p is 'much'; it must be a number."),
        (["set", "sampling.top_p", "2"], "sampling.top_p: top_p is 2.0; it must be above 0 and at most 1"),
        (["set", "model.name", "a\nb"], "model.name: name is 'a\\nb'; it must name a model, as in"),
        (["set", "model.draft", "a\x1bb"], "model.draft: draft is 'a\\x1bb'; it must name a model, as in"),
        (["set", "themes", "snow"], "Unknown setting themes; did you mean screen.theme?"),
        (["set", "spill_gb", "2"], "spill_gb is called offload_gb now; use that name."),
        (["unset", "xyzzy"], "Unknown setting xyzzy; chatterm config lists them all."),
    ],
)
def test_what_cannot_be_set_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["config", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not config_path().exists()


def test_a_wrong_file_is_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    config_path().write_text("[screen]\nthem = 1\n", encoding="utf-8")
    for words in (["config"], ["config", "set", "theme", "snow"], ["run", "-p", "hi"]):
        assert call(words) == 1
        assert f"{config_path()}, line 2: unknown setting screen.them" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_edit_opens_the_editor_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[Any]
) -> None:
    editor = tmp_path / "an editor.sh"
    editor.write_text('#!/bin/sh\nshift\nprintf "\\n[screen]\\n$TEXT\\n" >> "$1"\n', encoding="utf-8")
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", f"'{editor}' --wait")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("TEXT", 'theme = "snow"')
    call(["config", "edit"])
    error = capfd.readouterr().err
    assert "line" in error  # [screen] stands in the file that was made, and now a second time
    config_path().write_text("", encoding="utf-8")
    assert call(["config", "edit"]) == 0
    assert "is valid" in capfd.readouterr().err
    assert load_settings(config_path()).screen.theme == "snow"
    monkeypatch.setenv("EDITOR", "false")
    assert call(["config", "edit"]) == 1
    assert "false ended with status 1" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_ctrl_c_in_the_editor_of_the_settings_is_for_the_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nkill -INT $PPID\nsleep 0.1\necho >"$1"\n', encoding="utf-8")
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    assert call(["config", "edit"]) == 0
    assert config_path().read_text(encoding="utf-8") == "\n"


def test_a_setting_may_name_one_gpu_of_several(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert parse_settings('model.device = "cuda:1"', path).model.device == "cuda:1"
    with pytest.raises(
        SettingsError, match=r"line 1: Unknown device 'cuda:x'; it must be auto, cpu, cuda, or one"
    ):
        parse_settings('model.device = "cuda:x"', path)
