"""The names that a user may give for a model, and the errors for wrong ones."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from models.errors import ModelError
from models.files import ModelFiles
from models.hub import catalogue
from models.hub.download import HubModel
from models.hub.sources import local_models, parse, remove, resolve
from tests.counting import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "chatterm"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def folder_with(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, "config.json", "model.safetensors")
    assert resolve(str(folder)) == ModelFiles("my-model", folder=folder)
    monkeypatch.chdir(folder)
    assert resolve(".") == ModelFiles("my-model", folder=Path())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my-model") == ModelFiles("my-model", folder=folder)


def test_a_folder_named_like_a_hub_id_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path.parent)
    name = f"{tmp_path.name}/my-model"
    assert resolve(name).folder == Path(name)


@pytest.mark.parametrize("holds_model", [True, False])
def test_a_catalogue_name_tells_of_the_folder_that_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_model: bool
) -> None:
    monkeypatch.setattr(catalogue, "fetch", lambda source, on_progress: tmp_path / "fetched.gguf")
    monkeypatch.chdir(tmp_path)
    folder_with(tmp_path, "config.json", *(["model.safetensors"] if holds_model else [])).rename("smollm2")
    found = resolve("smollm2")
    assert found.gguf == tmp_path / "fetched.gguf"
    told = "smollm2 is the model of the catalogue. For the one in the folder smollm2 here, write ./smollm2."
    assert found.note == (told if holds_model else None)
    if holds_model:
        assert resolve("./smollm2") == ModelFiles("smollm2", folder=Path("smollm2"))


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF....")
    assert resolve(str(path)) == ModelFiles("tiny.gguf", gguf=path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no config.json, so it is not a model folder"),
        (["model.safetensors"], "has no config.json"),
        (["config.json"], r"has no \*.safetensors weights"),
        (["config.json", "pytorch_model.bin"], "only pickled weights: a pickle may run code"),
        (["tiny.gguf"], r"contains GGUF files; name one of them: .*tiny.gguf"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        resolve(str(folder_with(tmp_path, *names)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.gguf", b"<html>not found</html>", "is not a GGUF file"),
        ("empty.gguf", b"", "is not a GGUF file"),
        ("model.bin", b"PK", "has pickled weights: a pickle may run code"),
        ("model.safetensors", b"\x00", "name the folder that also has config.json"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        resolve(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name is empty"),
        ("smollm", "Unknown model smollm. Did you mean smollm2"),
        ("SmolLM2-135M", "Did you mean smollm2"),
        ("qwen3:0.5b", "Did you mean qwen3:0.6b"),
        ("qwen3-0.6b", "Did you mean .*qwen3:0.6b"),
        ("openai://localhost:8000/m", "is an address, not a model on this machine"),
        ("xyzzy", r"Unknown model xyzzy. Use a catalogue name \(smollm2, .* a folder, or a .gguf file"),
        ("./nowhere", "There is no file or folder ./nowhere"),
        ("/nowhere/at/all", "There is no file or folder /nowhere/at/all"),
        ("~nobody-here/x", "There is no file or folder ~nobody-here/x"),
        ("nowhere.gguf", "There is no file or folder nowhere.gguf"),
        ("a/b/c.gguf", "For a file on the Hub, use hf.co/a/b/c.gguf"),
        ("a/b/c", "Unknown model a/b/c"),
        ("hf.co/a", "is not the address of a model; use hf.co/owner/name"),
        ("\x1b[31mred", r"contains control characters: '\\x1b\[31mred'"),
        ("tell me a story " * 40, "has 639 characters"),
        ("acme/tiny", "acme/tiny is not on this machine and the network is off"),
    ],
)
def test_a_name_that_is_nothing(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        resolve(text)
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "text", ["QWEN3:0.6b", " qwen3:0.6b ", "hf.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main"]
)
def test_names_of_the_same_model(text: str) -> None:
    assert parse(text) == HubModel("Qwen/Qwen3-0.6B")


def test_every_catalogue_name_is_known() -> None:
    assert parse("smollm2") == catalogue.WHEELS["smollm2"]
    assert all(parse(name) == HubModel(repo) for name, repo in catalogue.HUB_NAMES.items())
    assert {parse(name) for name in catalogue.QWEN3} == {
        HubModel(f"Qwen/Qwen3-{size}B") for size in ("0.6", "1.7", "4", "8", "14", "32")
    }


def test_a_persons_own_files_are_never_removed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model.safetensors")
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    for path in (folder, gguf):
        with pytest.raises(ModelError, match="is your own; chatterm removes only what it downloaded"):
            remove(str(path))
    assert (folder / "model.safetensors").exists()
    assert gguf.exists()


@pytest.mark.parametrize("name", ["smollm2", "acme/tiny", "acme/tiny@v1", "hf.co/acme/tiny/x.gguf"])
def test_removing_what_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="is not on this machine; see: chatterm list"):
        remove(name)


def test_nothing_is_here_yet() -> None:
    assert local_models() == []


def test_a_cached_start_imports_neither_torch_nor_a_network_client() -> None:
    program = (
        "import sys, models.hub.sources, models.hub.inspect\n"
        "from models.errors import ModelError\n"
        "try: models.hub.sources.resolve('acme/tiny', offline=True)\n"
        "except ModelError: pass\n"
        "heavy = {'torch', 'transformers', 'httpx', 'httpx2', 'requests'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def cached_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model of the catalogue that is on this machine."""
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "cache"))
    tiny = replace(catalogue.WHEELS["smollm2"], name="tiny", gguf_bytes=4)
    monkeypatch.setitem(catalogue.WHEELS, "tiny", tiny)
    path = catalogue.place(tiny)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path.parent


def test_a_link_that_leads_nowhere_does_not_hide_the_models(cached_folder: Path) -> None:
    (cached_folder / "LICENSE").symlink_to("nowhere")
    assert [(model.name, model.bytes) for model in local_models()] == [("tiny", 4)]


def test_the_target_of_a_link_is_not_removed(cached_folder: Path, tmp_path: Path) -> None:
    moved = cached_folder.rename(tmp_path / "elsewhere")
    cached_folder.symlink_to(moved)
    with pytest.raises(ModelError, match=r"it is a link, .* delete both yourself"):
        remove("tiny")
    assert [path.stat().st_size for path in moved.iterdir()] == [4]
