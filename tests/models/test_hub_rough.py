"""A Hub, a cache and variables that say what cannot be: one line, nothing outside the cache, no memory without end."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from chatterm.cli.main import call
from models.errors import ModelError
from models.hub import response_head, transfer
from models.hub.cache import RepoCache
from models.hub.sources import local_models, resolve
from tests.counting import PATIENCE, patience
from tests.models.hub_server import HubServer, git_id
from tests.models.hub_world import CONFIG, FILES, REPO, ROOT, cache_of, contents, sharded

COMMIT = "a" * 40


def listed(*entries: object) -> bytes:
    return json.dumps({"sha": COMMIT, "siblings": entries}).encode()


def entry(name: str, content: bytes = b"", **fields: object) -> dict[str, object]:
    return {"rfilename": name, "size": len(content), "blobId": git_id(content), **fields}


def one_line_of(pull: str, *, words: str = "pull") -> None:
    with pytest.raises(ModelError) as caught:
        resolve(pull)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Nothing is freed deep inside nested brackets, where a finalizer of earlier garbage would fail."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
def test_a_listing_nested_without_end_is_none(server: HubServer) -> None:
    server.whole_answer = lambda path: (b"[" * 200_000, {}) if "/api/" in path else None
    one_line_of(REPO, words="does not answer like a Hub")


def test_a_listing_that_does_not_end_is_not_kept_in_memory(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_MOST_ANSWER", 1000)
    server.whole_answer = lambda path: (b" " * 100_000, {}) if "/api/" in path else None
    one_line_of(REPO, words="does not answer like a Hub")


@pytest.mark.parametrize("what", ["/api/", "config.json", "model.safetensors"])
def test_what_drips_counts_as_broken_off(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(transfer, "PATIENCE_S", 0.2)
    server.drips = lambda path: what in path
    one_line_of(REPO, words="(less than 1 kB a second arrives)")


@pytest.mark.parametrize("what", ["/api/", "config.json", "model.safetensors"])
def test_a_head_that_drips_counts_as_broken_off(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(response_head, "HEAD_S", 0.2)
    server.drips_head = lambda path: what in path
    one_line_of(REPO, words="(no answer in time)")


def test_what_dripped_for_a_while_is_continued(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def drips(path: str) -> bool:
        """Whether this one is to be broken off: only then is a busy machine as good as a slow server."""
        is_slow = len(server.asked_for("model.safetensors")) in (1, 2)
        monkeypatch.setattr(transfer, "PATIENCE_S", 0.2 if is_slow else PATIENCE)
        return is_slow

    server.drips = drips
    assert contents(resolve(REPO).folder) == FILES
    assert len(server.asked_for("model.safetensors")) == 3
    assert server.asked_for("model.safetensors")[2].headers["range"] != "bytes=0-"


@pytest.mark.parametrize("size", [-5, True, 1 << 70])
def test_a_size_that_no_file_has_is_asked_for_again(server: HubServer, size: object) -> None:
    entries = [entry(name, content) for name, content in FILES.items()]
    entries[-1]["size"] = size
    server.repos[REPO].commits[COMMIT] = FILES
    server.whole_answer = lambda path: (listed(*entries), {}) if "/api/" in path else None
    assert contents(resolve(REPO).folder) == FILES
    assert server.asked_for("model.safetensors", "HEAD")


@pytest.mark.parametrize("name", ["mod\ud800el.safetensors", "x" * 300 + ".safetensors"])
def test_a_name_that_no_file_has_is_left_out(server: HubServer, name: str) -> None:
    config = json.dumps(CONFIG).encode()
    body = listed(entry("config.json", config), entry(name))
    server.whole_answer = lambda path: (body, {}) if "/api/" in path else None
    one_line_of(REPO, words="has no model weights")


@pytest.mark.parametrize(
    "headers",
    [{"ETag": '".."'}, {"ETag": '"."'}, {"X-Linked-Size": "\u00b2"}, {"X-Linked-Size": "9" * 5000}],
)
def test_sizes_and_ids_of_files_are_believed_only_where_they_can_be(
    server: HubServer, headers: dict[str, str]
) -> None:
    server.sizes = False
    answer = {"ETag": '"abc"', "X-Linked-Size": "4096", **headers}
    server.whole_answer = lambda path: (b"", answer) if "/resolve/" in path else None
    one_line_of(REPO, words="does not say how large")
    assert not (cache_of() / "blobs").exists()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("index", [b"[" * 200_000, b'{"weight_map": {"a": 1, "b": "x"}}'])
def test_an_index_of_nonsense_is_damaged(server: HubServer, index: bytes) -> None:
    server.repo(REPO, sharded(2) | {"model.safetensors.index.json": index})
    one_line_of(REPO, words="index.json of acme/tiny is damaged")


@pytest.mark.parametrize("command", ["pull", "show"])
def test_a_description_of_gigabytes_is_not_fetched(
    server: HubServer, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = listed(entry("config.json", size=10**11), entry("model.safetensors"))
    server.whole_answer = lambda path: (body, {}) if "/api/" in path else None
    assert call([command, REPO]) == 1
    assert "config.json of acme/tiny has 100 GB, which cannot be right" in capsys.readouterr().err
    assert not server.asked_for("config.json")


def test_a_gguf_file_longer_than_any_is_one_line(
    server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repo(REPO, {"m.gguf": b"GGUF"})
    body = listed(entry("m.gguf", size=(1 << 60) - 1))
    server.repos[REPO].commits[COMMIT] = {"m.gguf": b"GGUF"}
    server.whole_answer = lambda path: (body, {}) if "/api/" in path else None
    assert call(["show", REPO]) == 1
    error = capsys.readouterr().err
    assert "by its listing, which no file here can have" in error
    assert error.count("\n") == 1


def test_a_connection_that_is_refused_is_told_without_a_number(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    one_line_of(REPO, words="Cannot reach http://127.0.0.1:9 (Connection refused)")


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://127.0.0.1:99999"])
def test_an_address_that_is_none(server: HubServer, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    one_line_of(REPO, words=f"{endpoint} is not an address; check HF_ENDPOINT")


def test_a_token_that_cannot_be_read(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/dev/null/token")
    one_line_of(REPO, words="The token in /dev/null/token cannot be read (Not a directory)")


@pytest.mark.parametrize("seconds", ["soon", "-1"])
def test_a_variable_that_is_no_number_is_one_line(tmp_path: Path, seconds: str) -> None:
    variables = {"HF_HUB_DOWNLOAD_TIMEOUT": seconds, "HF_HOME": str(tmp_path), "CHATTERM_DEBUG": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "chatterm", "list"],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("chatterm: A variable that begins with HF_ has a wrong value (")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": ["many", "abc"]},
        {"model.safetensors": [300_000, "../../../x"]},
        {"model.safetensors": [-1, None]},
        {"../../x": [1, "abc"]},
        [],
    ],
)
def test_a_damaged_listing_in_the_cache_is_as_none(server: HubServer, files: object) -> None:
    resolve(REPO)
    (path,) = (cache_of() / "chatterm").glob("*.json")
    path.write_text(json.dumps({"repo": REPO, "files": files}), encoding="utf-8")
    assert RepoCache(Path(constants.HF_HUB_CACHE), REPO).listing(path.stem) is None
    assert [model.name for model in local_models()] == [REPO]  # by its files
    path.write_text("[" * 200_000, encoding="utf-8")
    assert [model.name for model in local_models()] == [REPO]


def test_a_repository_of_thousands_of_files_is_listed_soon(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repo(REPO, FILES | {f"f{number}.gguf": b"GGUF" for number in range(500)})
    resolve(REPO)
    read, times = RepoCache.listing, 0

    def counted(cache: RepoCache, commit: str) -> object:
        nonlocal times
        times += 1
        return read(cache, commit)

    monkeypatch.setattr(RepoCache, "listing", counted)
    assert [model.name for model in local_models()] == [REPO]
    assert times == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["m.gguf", "folder/config.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    os.mkfifo(tmp_path / name)
    with patience():
        assert call(["show", str(folder if "/" in name else tmp_path / name)]) == 1
    assert "not a regular file" in capsys.readouterr().err
