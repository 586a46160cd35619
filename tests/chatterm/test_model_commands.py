"""pull, list, rm and show: what they print, and when they ask."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from chatterm.cli import models as model_commands
from chatterm.cli.main import call
from models.errors import ModelError
from models.files import ModelFiles
from models.hub.inspect import ModelFacts
from models.hub.sources import LocalModel
from models.progress import OnProgress, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(bytes(2_500_000))
    return ModelFiles("tiny", gguf=path)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, files: ModelFiles) -> list[LocalModel]:
    models = [LocalModel("tiny", files, 2_500_000, "catalogue")]
    monkeypatch.setattr(model_commands, "local_models", lambda: models)
    return models


def test_pull_shows_progress_on_err_and_the_result_on_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: ModelFiles
) -> None:
    def resolve(model: str, *, on_progress: OnProgress, refresh: bool) -> ModelFiles:
        assert (model, refresh) == ("tiny", True)
        on_progress(Progress("download", "tiny", 2_500_000, 2_500_000))
        return files

    monkeypatch.setattr(model_commands, "resolve", resolve)
    assert call(["pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "tiny is ready: chatterm run tiny\n"
    assert captured.err == "Downloading tiny: 2.5 MB of 2.5 MB\n"


def test_pull_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(model: str, **_: Any) -> ModelFiles:
        raise ModelError("There is no model here.")

    monkeypatch.setattr(model_commands, "resolve", resolve)
    assert call(["pull", "nope"]) == 1
    assert capsys.readouterr() == ("", "chatterm: There is no model here.\n")


def test_list_is_tab_separated_in_a_pipe(
    local: list[LocalModel], capsys: pytest.CaptureFixture[str], files: ModelFiles
) -> None:
    assert call(["list"]) == 0
    assert capsys.readouterr().out == f"tiny\t2500000\tcatalogue\t{files.gguf}\n"


def test_list_is_a_table_on_a_terminal(local: list[LocalModel], monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    assert call(["list"]) == 0
    assert "Model" in out.getvalue()
    assert "2.5 MB" in out.getvalue()


def test_list_without_models_says_what_to_do(
    local: list[LocalModel], capsys: pytest.CaptureFixture[str]
) -> None:
    local.clear()
    assert call(["list"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "chatterm pull smollm2" in captured.err


@pytest.mark.parametrize(("reply", "goes"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("", False)])
def test_rm_asks_on_a_terminal(
    local: list[LocalModel], monkeypatch: pytest.MonkeyPatch, reply: str, goes: bool
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(model_commands, "held_bytes", lambda model: 2_500_000)

    def remove(model: str) -> int:
        removed.append(model)
        return 2_500_000

    err = Terminal()
    monkeypatch.setattr(model_commands, "remove_files", remove)
    monkeypatch.setattr("sys.stdin", Terminal(reply))
    monkeypatch.setattr("sys.stderr", err)
    assert call(["rm", "tiny"]) == (0 if goes else 1)
    assert removed == (["tiny"] if goes else [])
    assert "Delete tiny (2.5 MB) from this machine? [y/N]" in err.getvalue()


@pytest.mark.parametrize(
    ("name", "said"),
    [("nonsense", "Unknown model nonsense"), ("smollm2", "smollm2 is not on this machine")],
)
def test_rm_does_not_ask_about_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, said: str
) -> None:
    err = Terminal()
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    monkeypatch.setattr("sys.stderr", err)
    assert call(["rm", name]) == 1
    assert said in err.getvalue()
    assert "Delete" not in err.getvalue()
    assert err.getvalue().count("\n") == 1


def test_rm_with_yes_does_not_ask(
    local: list[LocalModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_commands, "remove_files", lambda model: 2_500_000)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert call(["rm", "tiny", "--yes"]) == 0
    assert capsys.readouterr().out == "Deleted tiny; 2.5 MB freed.\n"


def test_show_tells_what_a_model_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: ModelFiles
) -> None:
    def resolve(model: str, *, offline: bool) -> ModelFiles:
        assert offline
        return files

    facts = ModelFacts(
        name="tiny",
        architecture="LlamaForCausalLM",
        supported=True,
        reason=None,
        parameters=134_515_008,
        context_length=8192,
        dtypes=(("Q4_1", 9), ("F32", 1)),
        has_chat_template=True,
        files=(("tiny.gguf", 2_500_000),),
    )
    monkeypatch.setattr(model_commands, "resolve", resolve)
    monkeypatch.setattr("models.hub.inspect.describe", lambda _: facts)
    assert call(["show", "tiny"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["Architecture", "LlamaForCausalLM"] in rows
    assert ["Parameters", "134.5 million"] in rows
    assert ["Context", "8,192 tokens"] in rows
    assert ["Weights", "Q4_1, F32"] in rows
    assert ["Chat", "template  yes"] in rows
    assert ["Runs", "here      yes"] in rows
    assert ["tiny.gguf,", "2.5 MB"] in rows


def write_weights(folder: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def test_show_says_why_a_model_does_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    write_weights(tmp_path)
    assert call(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Architecture   MambaForCausalLM" in shown
    assert "Runs here      no: " in shown


@pytest.mark.parametrize(("window", "known"), [(None, True), (64, False)])
def test_show_says_by_what_a_model_is_computed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    window: int | None,
    known: bool,
) -> None:
    config = {"num_hidden_layers": 2, "vocab_size": 32, "hidden_size": 128, "intermediate_size": 64}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 256}
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window or 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path)
    monkeypatch.setattr("engine.kernels.native.library.problem", lambda: None)
    assert call(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    slow = "plain PyTorch, which is slower: the {} kernels do not know a sliding window"
    assert "Runs here      yes" in shown
    assert f"On the CPU     {'native kernels' if known else slow.format('native')}" in shown
    assert f"On a GPU       {'fused kernels' if known else slow.format('fused')}" in shown


def test_show_of_the_default_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "smollm2"]) == 0
    shown = capsys.readouterr().out
    for part in ("LlamaForCausalLM", "134.5 million", "8,192 tokens", "Q4_1", str(smollm2), "98 MB"):
        assert part in shown
