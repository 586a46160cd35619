"""Addresses of remote models, remotes in the settings, and where their keys come from."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import EngineError
from chatterm.backends.remote.address import Address, Remote, found
from chatterm.backends.remote.keys import find_key, redact
from chatterm.settings.reading import parse_settings
from chatterm.settings.settings import SettingsError
from chatterm.settings.text import described

PATH = Path("config.toml")
WORK = Remote("https://example.org/api/v1", model="big", key_env="WORK_KEY")
REMOTES = {"work": WORK, "home": Remote("http://nas:11434", api="ollama")}


@pytest.mark.parametrize(
    ("text", "api", "url", "model"),
    [
        ("openai://localhost:8000/Qwen/Qwen3-8B", "chat", "http://localhost:8000/v1", "Qwen/Qwen3-8B"),
        ("openai://127.0.0.1:8000", "chat", "http://127.0.0.1:8000/v1", ""),
        ("openai://[::1]:8000/m", "chat", "http://[::1]:8000/v1", "m"),
        ("openai://example.org/m", "chat", "https://example.org/v1", "m"),
        ("openai+http://example.org:80/m", "chat", "http://example.org:80/v1", "m"),
        ("openai+https://localhost:8443/m", "chat", "https://localhost:8443/v1", "m"),
        ("openai://api.openai.com/gpt-5", "chat", "https://api.openai.com/v1", "gpt-5"),
        ("openai://openrouter.ai/a/b:free", "chat", "https://openrouter.ai/api/v1", "a/b:free"),
        ("responses://localhost:1/m", "responses", "http://localhost:1/v1", "m"),
        ("ollama://localhost/qwen3:8b", "ollama", "http://localhost:11434", "qwen3:8b"),
        ("ollama+http://nas/m", "ollama", "http://nas:11434", "m"),
        ("ollama://example.org/m", "ollama", "https://example.org", "m"),
    ],
)
def test_addresses(text: str, api: str, url: str, model: str) -> None:
    address = found(text, {})
    assert address is not None
    assert (address.api, address.url, address.model) == (api, url, model)
    assert address.name == text  # it finds it again
    assert found(address.name, {}) == address


def test_remotes_go_before_models_of_this_machine_and_no_further() -> None:
    at = found("work", REMOTES)
    assert at is not None
    assert (at.url, at.model, at.name) == ("https://example.org/api/v1", "big", "work/big")
    assert (other := found("work/a/b", REMOTES)) is not None
    assert (other.model, other.name) == ("a/b", "work/a/b")
    assert (home := found("home/qwen3", REMOTES)) is not None
    assert (home.url, home.api) == ("http://nas:11434", "ollama")
    for name in ("qwen3:0.6b", "Qwen/Qwen3-8B", "./work", "workshop/x", "hf.co/a/b/c.gguf"):
        assert found(name, REMOTES) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("openai:///m", "does not name a server"),
        ("openai://host:0/m", "does not name a server"),
        ("openai://[1]/m", "does not name a server"),
        ("openai://host:99999/m", "does not name a server"),
        ("openai://me:secret@host/m", "not contain a user or a key"),
        ("openai://host/a model", "no spaces"),
        ("openai://host/a\x1b[2J", "no spaces"),
        ("https://host/v1", "not the address of a model"),
    ],
)
def test_what_is_no_address_is_said_in_a_line(text: str, why: str) -> None:
    with pytest.raises(EngineError, match=why) as caught:
        found(text, {})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_an_address_a_model_or_an_error(text: str) -> None:
    for whole in (text, f"openai://{text}", f"work/{text}"):
        at, problem = None, ""
        try:
            at = found(whole, REMOTES)
        except EngineError as error:
            problem = str(error)
        assert len(problem.splitlines()) <= 1
        assert at is None or found(at.name, REMOTES) == at


def test_settings_name_remotes() -> None:
    source = '[remotes.work]\nurl = "http://h:1/v1"\nmodel = "m"\napi = "responses"\nkey_command = "pass x"\n'
    settings = parse_settings(source, PATH)
    assert settings.remotes == {"work": Remote("http://h:1/v1", "m", "responses", key_command="pass x")}
    assert parse_settings(described(settings, PATH, exists=True), PATH) == settings


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("remotes = 3", "line 1.*a table for each server"),
        ('[remotes."a b"]\nurl = "http://h"', "cannot be the name of a remote"),
        ("[remotes.a]\nmodel = 'm'", "line 1.*no url"),
        ("[remotes.a]\nurl = 'h'", "line 2.*must be the address"),
        ("[remotes.a]\nurl = 'http://u:p@h'", "line 2.*not contain a user or a key"),
        ("[remotes.a]\nurl = 'http://h'\nport = 3", "line 3.*unknown setting remotes.a.port"),
        ("[remotes.a]\nurl = 'http://h'\napi = 'x'", 'line 3.*one of "chat"'),
        ("[remotes.a]\nurl = 'http://h'\nkey_env = 'A'\nkeyring = 'B'", "keep one"),
        ("[remotes.a]\nurl = 'http://h'\nkey_env = 'sk-123'", "not the key itself"),
        ("[remotes]\na = 3", "write \\[remotes.a\\]"),
    ],
)
def test_what_is_wrong_with_a_remote_is_said_with_its_line(source: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        parse_settings(source, PATH)
    assert "sk-123" not in str(caught.value).replace("'sk-123'", "")


# --- keys ---


def _at(**remote: str) -> Address:
    at = found("work", {"work": Remote("https://h/v1", "m", **remote)})  # type: ignore[arg-type]
    assert at is not None
    return at


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK_KEY", " k-1 \n")
    assert find_key(_at(key_env="WORK_KEY")) == "k-1"
    monkeypatch.delenv("WORK_KEY")
    with pytest.raises(EngineError, match="WORK_KEY is not set"):
        find_key(_at(key_env="WORK_KEY"))
    assert find_key(_at()) is None


def test_usual_variables_are_for_their_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-2")
    for text, key in (
        ("openai://api.openai.com/m", "k-2"),
        ("openai+http://api.openai.com/m", None),
        ("openai://api.openai.com.evil.org/m", None),
        ("openai://localhost:8000/m", None),
    ):
        at = found(text, {})
        assert at is not None
        assert find_key(at) == key
    monkeypatch.delenv("OPENAI_API_KEY")
    at = found("openai://api.openai.com/m", {})
    assert at is not None
    assert find_key(at) is None


def test_a_key_from_a_command() -> None:
    python = sys.executable
    assert find_key(_at(key_command=f"{python} -c 'print(\"k-3\"); print(1)'")) == "k-3"
    for command, why in (
        (
            f"{python} -c 'import sys; print(\"no such entry\", file=sys.stderr); sys.exit(3)'",
            "code 3: no such",
        ),
        (f"{python} -c pass", "is empty"),
        (f"{python} -c 'print(\"two words\")'", "is not a key"),
        ("/no/such/program", "key_command failed: No such file"),
        ("'", "key_command failed"),
        ("", "key_command failed"),
    ):
        with pytest.raises(EngineError, match=why) as caught:
            find_key(_at(key_command=command))
        assert "two words" not in str(caught.value)


def test_a_command_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("x", 60)

    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(EngineError, match="did not finish within 60 s"):
        find_key(_at(key_command="x"))


def test_a_key_from_the_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(EngineError, match=r"pip install 'chatterm\[keyring\]'"):
        find_key(_at(keyring="chat"))
    kept = {("chat", "work"): "k-4"}
    module, errors = types.ModuleType("keyring"), types.ModuleType("keyring.errors")
    errors.KeyringError = type("KeyringError", (Exception,), {})  # type: ignore[attr-defined]
    module.get_password = lambda *where: kept.get(where)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", module)
    monkeypatch.setitem(sys.modules, "keyring.errors", errors)
    assert find_key(_at(keyring="chat")) == "k-4"
    with pytest.raises(EngineError, match="keyring set other work"):
        find_key(_at(keyring="other"))


def test_what_a_server_says_is_shown_without_the_key() -> None:
    assert redact("Incorrect key k-5!", "k-5") == "Incorrect key …!"
    assert redact("as it is", None) == "as it is"
