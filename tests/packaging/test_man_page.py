"""The manual page matches the commands' own help, and shell completion offers what it should."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from chatterm.cli.main import app
from chatterm.cli.shell_completion import model_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "chatterm.1"


def test_the_manual_page_is_made_of_the_help() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_man.py"))["page"]()
    assert PAGE.read_text(encoding="utf-8") == made, "make man"
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f".SS \\fBchatterm {name}\\fR" in made
        for param in command.params:
            for option in param.opts if param.param_type_name == "option" else ():
                assert f"\\fB{option.replace('-', chr(92) + '-')}\\fR" in made


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_it_is_typeset_without_a_warning() -> None:
    command = [
        "groff",
        "-man",
        "-Tascii",
        "-P-cbou",
        "-ww",
        str(PAGE),
    ]  # plain text: no bold, no colours
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "qwen3:0.6b" in done.stdout
    assert "'Why is the sky blue?'" in done.stdout


def test_names_of_models_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('[remotes.work]\nurl = "https://llm.example.org"\n')
    monkeypatch.setenv("CHATTERM_CONFIG", str(settings))

    class Local:
        name = "qwen-of-mine"

    monkeypatch.setattr("models.hub.sources.local_models", lambda: [Local])
    assert model_names("qwen3:0") == ["qwen3:0.6b", "qwen3:0.6b-q8"]
    assert "qwen-of-mine" in model_names("qwen")
    assert "smollm2" in model_names("")
    assert model_names("wor") == ["work"]
    settings.write_text("no = settings")
    assert model_names("wor") == []

    def fails() -> list[Local]:
        raise OSError("no cache")

    monkeypatch.setattr("models.hub.sources.local_models", fails)
    assert model_names("smollm2") == ["smollm2", "smollm2:1.7b"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chatterm ru", {"run"}),
        ("chatterm run qwen3:0", {"qwen3:0.6b", "qwen3:0.6b-q8"}),
        ("chatterm run --temp", {"--temperature"}),
    ],
)
def test_the_shell_asks_and_is_told(typed: str, offered: set[str]) -> None:
    asked = {"_CHATTERM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "chatterm"], cwd=ROOT, env=asked, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("number", ["abc", "", "-5", "9" * 5000], ids=["word", "empty", "negative", "huge"])
def test_a_number_of_a_word_that_is_none_is_no_failure(number: str) -> None:
    asked = {"_CHATTERM_COMPLETE": "complete_bash", "COMP_WORDS": "chatterm ru", "COMP_CWORD": number}
    done = subprocess.run(
        [sys.executable, "-m", "chatterm"], cwd=ROOT, env=asked, capture_output=True, text=True
    )
    assert done.stderr == ""
