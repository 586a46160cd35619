"""Files checked against the Hub's hashes, the catalogue's and manifests: damaged ones are named."""

import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from chatterm.cli.main import call
from models.errors import ModelError
from models.hub import catalogue
from models.hub.manifest import Manifest, manifest_path, read_manifest, write_manifest
from models.hub.sources import resolve
from models.hub.verify import Verdict, verify
from models.progress import Progress
from tests.models.hub_server import HubServer
from tests.models.hub_world import FILES, REPO, cache_of, server

__all__ = ["server"]


def states(verdict: Verdict) -> dict[str, str]:
    return {file.name: file.state for file in verdict.files}


def damage(path: Path) -> None:
    """Change one byte in the middle; the size stays the same."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.resolve().write_bytes(content)


@pytest.mark.parametrize("online", [False, True])
def test_files_of_the_hub(server: HubServer, online: bool) -> None:
    folder = resolve(REPO).folder
    assert folder is not None
    reports: list[Progress] = []
    asked = len(server.requests)
    good = verify(REPO, online=online, on_progress=reports.append)
    assert good.is_good
    assert set(states(good)) == set(FILES)
    assert (len(server.requests) > asked) == online
    assert reports[-1].done == reports[-1].total == sum(map(len, FILES.values()))
    damage(folder / "model.safetensors")
    damage(folder / "tokenizer.json")  # has git's hash, not LFS's
    (folder / "config.json").unlink()
    found = states(verify(REPO, online=online))
    assert {name for name, state in found.items() if state == "damaged"} == {
        "model.safetensors",
        "tokenizer.json",
    }
    assert found["config.json"] == "missing"


def test_a_snapshot_of_another_tool_is_checked_by_the_names_of_its_blobs(server: HubServer) -> None:
    folder = resolve(REPO).folder
    assert folder is not None
    for listing in (cache_of() / "chatterm").iterdir():
        listing.unlink()
    assert verify(REPO).is_good
    damage(folder / "model.safetensors")
    assert states(verify(REPO))["model.safetensors"] == "damaged"
    # Without links, only the Hub can tell what the content should be.
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(whole)
    assert states(verify(REPO))["model.safetensors"] == "unknown"
    assert not verify(REPO).is_good
    assert states(verify(REPO, online=True))["model.safetensors"] == "damaged"


def test_what_is_not_here_is_not_fetched(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (REPO, "smollm2"):
        with pytest.raises(ModelError, match="chatterm pull"):
            verify(name, online=True)
    assert not server.requests
    resolve(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert verify(REPO).is_good
    with pytest.raises(ModelError, match="network is off"):
        verify(REPO, online=True)


def test_the_command_names_the_damaged_file(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    folder = resolve(REPO).folder
    assert folder is not None
    assert call(["verify", REPO]) == 0
    assert f"{len(FILES)} files of {REPO} checked against the Hub's hashes" in capsys.readouterr().out
    damage(folder / "model.safetensors")
    assert call(["verify", REPO]) == 1
    printed = capsys.readouterr()
    (line,) = [line for line in printed.out.splitlines() if line.startswith("damaged")]
    assert "model.safetensors" in line
    assert hashlib.sha256(FILES["model.safetensors"]).hexdigest()[:16] in line
    assert "chatterm pull" in printed.err
    assert call(["verify", REPO, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["good"] is False
    assert call(["verify", "nobody/nothing"]) == 1
    assert "\n" not in capsys.readouterr().err.strip()


def test_a_manifest(tmp_path: Path) -> None:
    model = tmp_path / "small.gguf"
    model.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(ModelError, match="no manifest"):
        verify(str(model))
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    manifest = Manifest("acme/tiny", "0" * 40, "int4", 0.01, {"small.gguf": digest})
    write_manifest(manifest_path(model), manifest)
    assert read_manifest(model) == manifest
    assert verify(str(model)).is_good
    damage(model)
    assert states(verify(str(model))) == {"small.gguf": "damaged"}
    for files in ([], {}, {"../x": digest}, {"a": "b"}):
        manifest_path(model).write_text(json.dumps({"files": files}))
        with pytest.raises(ModelError, match="manifest"):
            verify(str(model))
    for more in ({"files": {"x" * 300: digest}}, {"files": {"small.gguf": digest}, "kl": 10**400}):
        manifest_path(model).write_text(json.dumps(more))
        if "kl" in more:
            assert not verify(str(model)).is_good
        else:
            with pytest.raises(ModelError, match="cannot be read"):
                verify(str(model))


def test_what_a_manifest_says_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "small.gguf"
    model.write_bytes(b"GGUF")
    raw = {"source": "\x1b[31mred\nnext", "files": {"small.gguf": "0" * 64}}
    manifest_path(model).write_text(json.dumps(raw))
    assert call(["verify", str(model)]) == 1
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert printed.err == "1 of 1 files is not what its manifest (from red next) says.\n"


def test_a_cache_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", "/cache/x")

    monkeypatch.setattr(Path, "is_file", forbidden)
    for command in ("pull", "show", "verify"):
        assert call([command, "smollm2"]) == 1
        assert capsys.readouterr().err == "chatterm: Cannot read the cache: Permission denied (/cache/x).\n"


def test_a_file_that_would_be_loaded_but_is_not_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    write_manifest(
        manifest_path(tmp_path), Manifest("acme/tiny", None, "int4", None, {"model.safetensors": digest})
    )
    (tmp_path / "notes.txt").write_text("mine")
    assert verify(str(tmp_path)).is_good
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # would send the loader to other weights
    assert states(verify(str(tmp_path)))["model.safetensors.index.json"] == "unknown"
    assert call(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "unknown  model.safetensors.index.json" in printed.out
    assert "1 file" in printed.err
    assert "delete what you did not add" in printed.err


def test_a_model_of_the_catalogue_that_was_cut_off_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path))
    path = catalogue.place(catalogue.WHEELS["smollm2"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert states(verify("smollm2")) == {path.name: "damaged"}
