"""Fetching from the Hub: the requests, resumed downloads, refusals, and the messages for them."""

import json
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from models.errors import ModelError
from models.hub import download as hub
from models.hub import sources
from models.hub.sources import local_models, remove, resolve
from models.progress import Progress
from tests.counting import PATIENCE
from tests.models.hub_server import HubServer, content_id
from tests.models.hub_world import (
    CONFIG,
    FILES,
    REPO,
    TOTAL,
    USELESS,
    WEIGHTS,
    bytes_in,
    cache_of,
    contents,
    sharded,
)


def test_fetches_only_the_files_needed_and_reports_every_byte(server: HubServer) -> None:
    reports: list[Progress] = []
    files = resolve(REPO, on_progress=reports.append)
    assert files.name == REPO
    assert contents(files.folder) == FILES
    assert not any(server.asked_for(name.rsplit("/")[-1]) for name in USELESS)
    done = [report.done for report in reports]
    assert done == sorted(done)
    assert (reports[-1].stage, reports[-1].done, reports[-1].total) == ("download", TOTAL, TOTAL)


def test_a_cut_connection_is_continued_where_it_stopped(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [100_000, 50_000]
    files = resolve(REPO)
    assert contents(files.folder) == FILES
    ranges = [request.headers.get("range") for request in server.asked_for("model.safetensors")]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_connection_that_keeps_breaking_leaves_nothing_that_looks_complete(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [100_000] + [0] * 10
    with pytest.raises(ModelError, match=r"stopped at 100 kB of 300 kB .* again to continue") as error:
        resolve(REPO)
    assert "\n" not in str(error.value)
    assert local_models() == []
    assert not (cache_of() / "snapshots").exists()
    assert huggingface_hub.try_to_load_from_cache(REPO, "config.json", constants.HF_HUB_CACHE) is None
    with pytest.raises(ModelError, match=r"is incomplete .* chatterm pull acme/tiny"):
        resolve(REPO, offline=True)

    server.cuts.clear()
    server.requests.clear()
    reports: list[Progress] = []
    assert contents(resolve(REPO, on_progress=reports.append).folder) == FILES
    (again,) = server.asked_for("model.safetensors")
    assert again.headers["range"] == "bytes=100000-"
    assert server.asked_for("config.json") == []
    known = [report for report in reports if report.total is not None]
    assert known[0].done == TOTAL - 200_000


def test_a_stopped_download_is_continued(server: HubServer) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.done > 150_000:
            raise Stop

    with pytest.raises(Stop):
        resolve(REPO, on_progress=stop)
    assert local_models() == []
    kept = (cache_of() / "blobs" / f"{content_id('model.safetensors', WEIGHTS)}.incomplete").stat().st_size
    assert 0 < kept < len(WEIGHTS)
    server.requests.clear()
    assert contents(resolve(REPO).folder) == FILES
    assert server.asked_for("model.safetensors")[0].headers["range"] == f"bytes={kept}-"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_wrong_checksum_discards_that_file(server: HubServer, name: str) -> None:
    server.altered.add(name)
    with pytest.raises(ModelError, match=f"checksum of {name} from acme/tiny is wrong"):
        resolve(REPO)
    assert local_models() == []
    assert not list((cache_of() / "blobs").glob(content_id(name, FILES[name]) + "*"))
    server.altered.clear()
    assert contents(resolve(REPO).folder) == FILES


def test_a_server_that_cannot_continue_starts_over(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [200_000]
    server.ranges = False
    reports: list[Progress] = []
    assert contents(resolve(REPO, on_progress=reports.append).folder) == FILES
    done = [report.done for report in reports]
    assert done == sorted(done)


def test_leftovers_that_are_too_long_are_dropped(server: HubServer) -> None:
    part = cache_of() / "blobs" / f"{content_id('model.safetensors', WEIGHTS)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (len(WEIGHTS) + 1))
    assert contents(resolve(REPO).folder) == FILES


def test_a_busy_server_is_asked_again(server: HubServer) -> None:
    statuses = iter([503, 429])
    server.answer = lambda path: next(statuses, None)
    assert contents(resolve(REPO).folder) == FILES


@pytest.mark.parametrize(
    ("access", "token", "model", "message"),
    [
        ("public", None, "acme/none", r"no public model acme/none .* check the name"),
        ("public", "hf_good", "acme/none", r"There is no model acme/none"),
        ("public", None, "acme/tiny@v9", r"acme/tiny has no revision v9"),
        ("public", None, "hf.co/acme/tiny/x.gguf", r"acme/tiny has no file x.gguf"),
        (
            "gated",
            None,
            REPO,
            r"gated: accept its licence on \S+/acme/tiny, then .*`hf auth login` or set HF_TOKEN",
        ),
        ("gated", "hf_other", REPO, r"gated and your account has no access yet: accept its licence"),
        ("private", None, REPO, r"private or gated.*`hf auth login` or set HF_TOKEN"),
    ],
)
def test_refusals_say_what_to_do(
    server: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    access: str,
    token: str | None,
    model: str,
    message: str,
) -> None:
    server.repos[REPO].access = access
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=message) as error:
        resolve(model)
    assert "\n" not in str(error.value)
    assert local_models() == []


@pytest.mark.parametrize(
    ("status", "words"), [(403, "your token"), (401, "your token"), (500, "answered 500"), (418, "418")]
)
def test_other_answers_are_one_line(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, status: int, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    server.answer = lambda path: status
    with pytest.raises(ModelError, match=words):
        resolve(REPO)


def test_a_server_that_is_no_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server.url + "/acme/tiny/resolve/main/README.md?")
    with pytest.raises(ModelError, match="does not answer like a Hub; check HF_ENDPOINT"):
        resolve(REPO)


def test_no_network(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"Cannot reach http://127.0.0.1:9 .* check the network"):
        resolve(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "nonsense")
    with pytest.raises(ModelError, match="Cannot reach nonsense"):
        resolve(REPO)


def test_a_server_that_falls_silent(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    over = threading.Event()

    def hang(name: str) -> None:
        if name == "model.safetensors":
            over.wait(PATIENCE)

    server.before_file = hang
    try:
        with pytest.raises(ModelError, match=r"no answer in time\); run the same command again"):
            resolve(REPO)
    finally:
        over.set()
    server.before_file = lambda name: None
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    assert contents(resolve(REPO).folder) == FILES


def test_too_little_disk_space_is_said_before_downloading(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(
        ModelError, match=r"300 kB are needed, 1 kB are free; free some space, or set HF_HOME"
    ):
        resolve(REPO)
    assert not server.asked_for("model.safetensors")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile(server: HubServer) -> None:
    part = cache_of() / "blobs" / f"{content_id('model.safetensors', WEIGHTS)}.incomplete"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"The disk is full in .*; free some space, or set HF_HOME"):
        resolve(REPO)
    assert local_models() == []
    part.unlink()
    assert contents(resolve(REPO).folder) == FILES


def test_pickled_weights_are_refused_before_anything_is_fetched(server: HubServer) -> None:
    server.repo("acme/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelError, match=r"only pickled weights.* may run code .* safetensors or GGUF"):
        resolve("acme/old")
    assert len(server.requests) == 1


def test_an_unsupported_architecture_is_refused_before_its_weights(server: HubServer) -> None:
    server.repo(
        "acme/bert", FILES | {"config.json": json.dumps(CONFIG | {"architectures": ["BertModel"]}).encode()}
    )
    with pytest.raises(ModelError, match="BertModel"):
        resolve("acme/bert")
    assert not server.asked_for("model.safetensors")


def test_sharded_weights(server: HubServer) -> None:
    server.repo("acme/big", sharded(3) | USELESS)
    assert contents(resolve("acme/big").folder) == sharded(3)


def test_a_lost_shard_is_named(server: HubServer) -> None:
    files = sharded(3)
    del files["model-00002-of-00003.safetensors"]
    server.repo("acme/big", files)
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003.safetensors"):
        resolve("acme/big")
    assert not server.asked_for("model-00001-of-00003.safetensors")


def test_gguf_files(server: HubServer) -> None:
    gguf = {"tiny-Q8_0.gguf": b"GGUF" + b"8" * 5000, "sub/tiny-Q4_0.gguf": b"GGUF" + b"4" * 3000}
    server.repo("acme/tiny-GGUF", gguf | {"README.md": b"read"})
    with pytest.raises(
        ModelError, match=r"several GGUF files; choose one.*hf.co/acme/tiny-GGUF/sub/tiny-Q4_0.gguf"
    ):
        resolve("acme/tiny-GGUF")
    with pytest.raises(
        ModelError, match=r"no file tiny-Q5.gguf. It has .*hf.co/acme/tiny-GGUF/tiny-Q8_0.gguf"
    ):
        resolve("hf.co/acme/tiny-GGUF/tiny-Q5.gguf")
    files = resolve("https://huggingface.co/acme/tiny-GGUF/blob/main/tiny-Q8_0.gguf")
    assert files.folder is None
    assert files.gguf is not None
    assert files.gguf.read_bytes() == gguf["tiny-Q8_0.gguf"]
    assert files.name == "hf.co/acme/tiny-GGUF/tiny-Q8_0.gguf"
    resolve("hf.co/acme/tiny-GGUF/sub/tiny-Q4_0.gguf")
    assert [(model.name, model.bytes) for model in local_models()] == [
        ("hf.co/acme/tiny-GGUF/sub/tiny-Q4_0.gguf", 3004),
        ("hf.co/acme/tiny-GGUF/tiny-Q8_0.gguf", 5004),
    ]
    assert remove("hf.co/acme/tiny-GGUF/sub/tiny-Q4_0.gguf") == 3004
    assert resolve(files.name, offline=True) == files
    remove(files.name)
    assert not cache_of("acme/tiny-GGUF").exists()


def test_a_repository_with_a_single_gguf_file_needs_no_file_name(server: HubServer) -> None:
    server.repo("acme/one", {"one.gguf": b"GGUF1", "config.json": b"{}"})
    files = resolve("acme/one")
    assert files.gguf is not None
    assert files.gguf.name == "one.gguf"
    assert resolve("acme/one", offline=True) == files
    assert [model.name for model in local_models()] == ["hf.co/acme/one/one.gguf"]


def test_a_gguf_in_several_files_is_one_model(server: HubServer) -> None:
    parts = {f"big/m-0000{i}-of-00003.gguf": b"GGUF%d" % i for i in (1, 2, 3)}
    server.repo("acme/split", parts | {"small.gguf": b"GGUF", "README.md": b"x"})
    with pytest.raises(
        ModelError, match=r"several GGUF files.*big/m-00001-of-00003\.gguf, hf\.co/acme/split/small"
    ):
        resolve("acme/split")
    files = resolve("hf.co/acme/split/big/m-00002-of-00003.gguf")
    assert files.gguf is not None
    assert files.gguf.name == "m-00001-of-00003.gguf"
    assert sorted(path.name for path in files.gguf.parent.iterdir()) == [name[4:] for name in parts]
    (model,) = local_models()
    assert (model.name, model.bytes) == ("hf.co/acme/split/big/m-00001-of-00003.gguf", 15)
    assert resolve(model.name, offline=True).gguf == files.gguf
    assert remove(model.name) >= 15
    assert local_models() == []


def test_a_gguf_that_lacks_a_part_is_refused(server: HubServer) -> None:
    server.repo("acme/split", {"m-00001-of-00002.gguf": b"GGUF", "README.md": b"x"})
    with pytest.raises(ModelError, match=r"lacks m-00002-of-00002\.gguf"):
        resolve("acme/split")


def test_a_mirror_that_lists_no_sizes(server: HubServer) -> None:
    server.sizes = False
    server.cuts["model.safetensors"] = [10_000]
    assert contents(resolve(REPO).folder) == FILES
    assert contents(resolve(REPO, offline=True).folder) == FILES
    assert server.asked_for("model.safetensors", "HEAD")


@pytest.mark.parametrize("sizes", [True, False])
def test_a_repository_that_was_renamed(server: HubServer, sizes: bool) -> None:
    server.moved["acme/former"] = REPO
    server.sizes = sizes
    files = resolve("acme/former")
    assert contents(files.folder) == FILES
    assert resolve("acme/former", offline=True) == files


def test_the_token_stays_with_the_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    server.repos[REPO].access = "gated"
    for sizes in (True, False):
        with HubServer() as cdn:
            server.cdn, server.sizes = cdn, sizes
            cdn.cuts["model.safetensors"] = [100_000]
            assert contents(resolve(REPO).folder) == FILES
            assert {request.headers["authorization"] for request in server.requests} == {"Bearer hf_good"}
            assert [request.headers.get("range") for request in cdn.requests] == [None, "bytes=100000-"]
            assert all("authorization" not in request.headers for request in cdn.requests)
        remove(REPO)


def test_names_from_a_server_cannot_leave_the_cache(server: HubServer, tmp_path: Path) -> None:
    server.repo("acme/evil", {"../../../../evil.gguf": b"GGUF", "ok.gguf": b"GGUF"})
    assert resolve("acme/evil").gguf is not None
    with pytest.raises(ModelError):
        resolve("hf.co/acme/evil/../../../../evil.gguf")
    assert not list(tmp_path.rglob("evil.gguf"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", hub.HubModel("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", hub.HubModel("Qwen/Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B@refs/pr/3", hub.HubModel("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("a/b/c", None),
        ("a/../b", None),
        ("a/b@../x", None),
        ("a--b/c", None),
        ("-a/b", None),
        ("a/b c", None),
    ],
)
def test_hub_ids(text: str, expected: hub.HubModel | None) -> None:
    assert hub.parse_id(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf.co/a/b", hub.HubModel("a/b")),
        ("hf.co/a/b@v1", hub.HubModel("a/b", "v1")),
        ("https://huggingface.co/a/b/tree/v1", hub.HubModel("a/b", "v1")),
        ("hf.co/a/b/c.gguf", hub.HubModel("a/b", "main", "c.gguf")),
        ("https://hf.co/a/b/sub/c.gguf", hub.HubModel("a/b", "main", "sub/c.gguf")),
        ("https://huggingface.co/a/b/blob/main/c.gguf", hub.HubModel("a/b", "main", "c.gguf")),
        ("https://huggingface.co/a/b/resolve/v1/c.gguf?download=true", hub.HubModel("a/b", "v1", "c.gguf")),
        ("example.com/a/b", None),
    ],
)
def test_hub_addresses(text: str, expected: hub.HubModel | None) -> None:
    found = hub.parse_url(text)
    assert found == expected
    if found is not None:
        assert (hub.parse_id(found.name) or hub.parse_url(found.name)) == found


def test_what_has_arrived_of_one_file_can_be_removed(server: HubServer) -> None:
    server.repo("acme/files", {"x.gguf": b"GGUF" + bytes(5000), "y.gguf": b"GGUF"})
    server.cuts["x.gguf"] = [100] + [0] * 10
    name = "hf.co/acme/files/x.gguf"
    with pytest.raises(ModelError, match="stopped at"):
        resolve(name)
    assert sources.held_bytes(name) == 100
    assert remove(name) > 0
    assert bytes_in(cache_of("acme/files")) == 0
    with pytest.raises(ModelError, match="is not on this machine"):
        sources.held_bytes(name)


def test_what_is_held_is_told_before_it_is_removed(server: HubServer) -> None:
    server.repo("acme/files", {"x.gguf": b"GGUF" + bytes(5000), "y.gguf": b"GGUF"})
    for name in (REPO, f"{REPO}@main", "hf.co/acme/files/x.gguf"):
        resolve(name)
        assert sources.held_bytes(name) > 0
        remove(name)
        with pytest.raises(ModelError, match="is not on this machine"):
            sources.held_bytes(name)
