"""The Hub's cache: when a model counts as complete, several versions, other tools, removal."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from models.errors import ModelError
from models.hub.sources import local_models, remove, resolve
from models.progress import Progress
from tests.counting import PATIENCE
from tests.models.hub_server import HubServer, content_id
from tests.models.hub_world import (
    FILES,
    REPO,
    TOTAL,
    WEIGHTS,
    bytes_in,
    cache_of,
    contents,
    run_python,
    sharded,
)


def test_other_tools_find_the_model_in_the_cache(server: HubServer) -> None:
    folder = resolve(REPO).folder
    path = huggingface_hub.snapshot_download(
        REPO, allow_patterns=list(FILES), local_files_only=True, cache_dir=constants.HF_HUB_CACHE
    )
    assert Path(path) == folder
    report = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    assert not report.warnings
    assert [(repo.repo_id, repo.size_on_disk) for repo in report.repos] == [(REPO, TOTAL)]


@pytest.mark.parametrize("offline", [False, True])
def test_a_complete_model_needs_no_network(server: HubServer, offline: bool) -> None:
    first = resolve(REPO)
    asked = len(server.requests)
    assert resolve(REPO, offline=offline) == first
    assert len(server.requests) == asked


def test_environment_variables_are_honoured_in_a_fresh_process(server: HubServer, tmp_path: Path) -> None:
    server.repos[REPO].access = "private"
    environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_good"}
    program = f"from models.hub.sources import resolve; print(resolve({REPO!r}).folder)"
    folder = Path(run_python(program, **environment))
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert contents(folder) == FILES
    asked = len(server.requests)
    assert run_python(program, **environment, HF_HUB_OFFLINE="1") == str(folder)
    assert len(server.requests) == asked


def test_a_truncated_blob_is_noticed_and_fetched_again(server: HubServer) -> None:
    files = resolve(REPO)
    assert files.folder is not None
    blob = (files.folder / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:1000])
    with pytest.raises(ModelError, match="incomplete"):
        resolve(REPO, offline=True)
    assert local_models() == []
    assert contents(resolve(REPO).folder) == FILES


def test_a_newer_version_comes_only_when_asked_for(server: HubServer) -> None:
    old = resolve(REPO)
    newer = FILES | {"tokenizer.json": b'{"model": {"newer": 1}}'}
    server.repos[REPO].push(newer)
    server.requests.clear()
    assert resolve(REPO) == old
    assert server.requests == []

    server.cuts["tokenizer.json"] = [0] * 10
    with pytest.raises(ModelError, match="stopped at"):
        resolve(REPO, refresh=True)
    assert resolve(REPO) == old, "an interrupted refresh leaves the old version in use"

    server.cuts.clear()
    assert contents(resolve(REPO, refresh=True).folder) == newer
    assert contents(resolve(REPO, offline=True).folder) == newer
    assert not server.asked_for("model.safetensors"), "weights that did not change are not fetched again"


def test_revisions_are_kept_apart(server: HubServer) -> None:
    other = FILES | {"tokenizer.json": b"other"}
    commit = server.repos[REPO].push(other, "refs/pr/1")
    assert contents(resolve(f"{REPO}@refs/pr/1").folder) == other
    assert contents(resolve(f"{REPO}@{commit}", offline=True).folder) == other
    assert contents(resolve(REPO).folder) == FILES
    assert [model.name for model in local_models()] == [REPO, f"{REPO}@refs/pr/1"]
    before = bytes_in(cache_of())
    assert remove(f"{REPO}@refs/pr/1") == before - bytes_in(cache_of())
    assert contents(resolve(REPO, offline=True).folder) == FILES


def fetch_with_huggingface_hub(server: HubServer, repo: str, patterns: list[str]) -> Path:
    """Fetch as other tools do, in a separate process, because HF_ENDPOINT is read at import."""
    program = (
        f"import huggingface_hub as h; print(h.snapshot_download({repo!r}, allow_patterns={patterns!r}))"
    )
    return Path(run_python(program, HF_ENDPOINT=server.url, HF_HUB_CACHE=constants.HF_HUB_CACHE))


def test_a_model_fetched_by_another_tool_runs_offline(server: HubServer) -> None:
    folder = fetch_with_huggingface_hub(server, REPO, ["*.json", "*.safetensors"])
    asked = len(server.requests)
    assert resolve(REPO, offline=True).folder == folder
    assert [model.name for model in local_models()] == [REPO]
    assert len(server.requests) == asked
    # Once online, files that the other tool left out are added.
    assert (resolve(REPO).folder, (folder / "chat_template.jinja").exists()) == (folder, True)
    assert len(server.asked_for("model.safetensors")) == 1


def test_a_model_half_fetched_by_another_tool_is_not_complete(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repo("acme/big", sharded(3))
    folder = fetch_with_huggingface_hub(server, "acme/big", ["*.json", "model-00001*"])
    assert local_models() == []
    with pytest.raises(ModelError, match="incomplete"):
        resolve("acme/big", offline=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="Cannot reach"):
        resolve("acme/big")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    assert resolve("acme/big").folder == folder
    assert {*contents(folder)} >= {*sharded(3)}


def test_two_at_once_fetch_the_weights_once(server: HubServer) -> None:
    asked, waiting = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "model.safetensors":
            asked.set()
            assert waiting.wait(PATIENCE)

    def second(progress: Progress) -> None:
        # Reported while waiting for the lock: everything but the weights is there.
        if progress.total is not None:
            waiting.set()

    server.before_file = hold
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(resolve, REPO)
        assert asked.wait(PATIENCE)
        two = pool.submit(resolve, REPO, on_progress=second)
        assert one.result(PATIENCE) == two.result(PATIENCE)
    assert len(server.asked_for("model.safetensors")) == 1


def test_a_file_system_without_links(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    files = resolve(REPO)
    assert contents(files.folder) == FILES
    assert resolve(REPO, offline=True) == files
    newer = FILES | {"tokenizer.json": b"newer"}
    server.repos[REPO].push(newer)
    assert contents(resolve(REPO, refresh=True).folder) == newer
    before = bytes_in(cache_of())
    assert remove(REPO) == before


def test_files_of_equal_content_without_links(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    twins = FILES | {"added_tokens.json": b"{}", "special_tokens_map.json": b"{}", "vocab.json": b"{}"}
    server.repos[REPO].push(twins)
    assert contents(resolve(REPO).folder) == twins
    assert contents(resolve(REPO, offline=True).folder) == twins
    assert not any((cache_of() / "blobs").iterdir()), "nothing is kept twice"


def test_blobs_in_a_shared_store_are_kept_while_a_revision_needs_them(
    server: HubServer, tmp_path: Path
) -> None:
    server.repos[REPO].push(FILES | {"tokenizer.json": b"other"}, "v2")
    resolve(f"{REPO}@v2")
    resolve(REPO)
    blob = cache_of() / "blobs" / content_id("model.safetensors", WEIGHTS)
    shared = blob.rename(tmp_path / "in-the-store")
    blob.symlink_to(shared)
    remove(f"{REPO}@v2")
    assert contents(resolve(REPO, offline=True).folder) == FILES


def test_removing_frees_exactly_what_it_says(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [100_000] + [0] * 10
    with pytest.raises(ModelError):
        resolve(REPO)
    before = bytes_in(cache_of())
    assert before > 100_000
    assert remove(REPO) == before, "an unfinished download can be removed"
    assert not cache_of().exists()
    server.cuts.clear()
    resolve(REPO)
    assert [(model.name, model.bytes, model.source) for model in local_models()] == [(REPO, TOTAL, "hub")]
    before = bytes_in(cache_of())
    assert remove(REPO) == before
    assert local_models() == []
    with pytest.raises(ModelError, match="acme/tiny is not on this machine; see: chatterm list"):
        remove(REPO)
