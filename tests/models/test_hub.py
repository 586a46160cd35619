"""The Hub, spoken to through a loopback server: what is fetched, what is resumed, what is refused."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from models import fetching, hub, transfer
from models.errors import ModelError
from models.progress import Progress
from models.sources import local_models, remove, resolve
from tests.models.hub_server import HubServer, content_id

REPO = "acme/tiny"
ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"top_k": 20}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
}
USELESS = {
    ".gitattributes": b"*",
    "README.md": b"# read me",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"the same again",
    "training_args.bin": b"pickle",
}
TOTAL = sum(map(len, FILES.values()))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with one model, and an empty cache."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(name)
    with HubServer() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
        monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.0, 0.0, 0.0))
        monkeypatch.setattr(fetching, "REPORT_EVERY_S", 0.0)
        monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "chatterm"))
        running.repo(REPO, FILES | USELESS)
        yield running


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_python(program: str, **environment: str) -> str:
    """What a program prints, run by a fresh interpreter with these environment variables added."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def cache_of(repo: str = REPO) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def test_fetches_only_the_files_needed_and_reports_every_byte(server: HubServer) -> None:
    reports: list[Progress] = []
    files = resolve(REPO, on_progress=reports.append)
    assert files.name == REPO
    assert contents(files.folder) == FILES
    assert not any(server.asked_for(name.rsplit("/")[-1]) for name in USELESS)
    done = [report.done for report in reports]
    assert done == sorted(done)
    assert (reports[-1].stage, reports[-1].done, reports[-1].total) == ("download", TOTAL, TOTAL)


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
    program = f"from models.sources import resolve; print(resolve({REPO!r}).folder)"
    folder = Path(run_python(program, **environment))
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert contents(folder) == FILES
    asked = len(server.requests)
    assert run_python(program, **environment, HF_HUB_OFFLINE="1") == str(folder)
    assert len(server.requests) == asked


def test_a_cut_connection_is_continued_where_it_stopped(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [100_000, 50_000]
    files = resolve(REPO)
    assert contents(files.folder) == FILES
    ranges = [request.headers.get("range") for request in server.asked_for("model.safetensors")]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_connection_that_keeps_breaking_leaves_nothing_that_looks_complete(server: HubServer) -> None:
    server.cuts["model.safetensors"] = [100_000] + [0] * 10
    with pytest.raises(ModelError, match=r"broke off at 100 kB of 300 kB .* again to continue") as error:
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


def test_a_truncated_blob_is_noticed_and_fetched_again(server: HubServer) -> None:
    files = resolve(REPO)
    assert files.folder is not None
    blob = (files.folder / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:1000])
    with pytest.raises(ModelError, match="incomplete"):
        resolve(REPO, offline=True)
    assert local_models() == []
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
            over.wait(10)

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
    with pytest.raises(ModelError, match=r"300 kB are needed, 1.0 kB are free; free some, or set HF_HOME"):
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


def sharded(shards: int) -> dict[str, bytes]:
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    index = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}).encode()
    small = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    return small | {"model.safetensors.index.json": index} | {name: name.encode() * 100 for name in names}


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


def test_a_newer_version_comes_only_when_asked_for(server: HubServer) -> None:
    old = resolve(REPO)
    newer = FILES | {"tokenizer.json": b'{"model": {"newer": 1}}'}
    server.repos[REPO].push(newer)
    server.requests.clear()
    assert resolve(REPO) == old
    assert server.requests == []

    server.cuts["tokenizer.json"] = [0] * 10
    with pytest.raises(ModelError, match="broke off"):
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


def test_gguf_files(server: HubServer) -> None:
    gguf = {"tiny-Q8_0.gguf": b"GGUF" + b"8" * 5000, "sub/tiny-Q4_0.gguf": b"GGUF" + b"4" * 3000}
    server.repo("acme/tiny-GGUF", gguf | {"README.md": b"read"})
    with pytest.raises(
        ModelError, match=r"several GGUF files; name one.*hf.co/acme/tiny-GGUF/sub/tiny-Q4_0.gguf"
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


def test_a_split_gguf_is_refused(server: HubServer) -> None:
    server.repo("acme/split", {"m-00001-of-00002.gguf": b"GGUF", "m-00002-of-00002.gguf": b"GGUF"})
    with pytest.raises(ModelError, match="one part of a split GGUF"):
        resolve("hf.co/acme/split/m-00001-of-00002.gguf")


def test_a_mirror_that_lists_no_sizes(server: HubServer) -> None:
    server.sizes = False
    server.cuts["model.safetensors"] = [10_000]
    assert contents(resolve(REPO).folder) == FILES
    assert contents(resolve(REPO, offline=True).folder) == FILES
    assert server.asked_for("model.safetensors", "HEAD")


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


def fetch_with_huggingface_hub(server: HubServer, repo: str, patterns: list[str]) -> Path:
    """Fetch as other tools do, in a process of its own: HF_ENDPOINT is read at import."""
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
    # Once online, what the other tool left out is added.
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
            assert waiting.wait(10)

    def second(progress: Progress) -> None:
        # Reported from the wait for the lock: everything but the weights is there.
        if progress.total is not None:
            waiting.set()

    server.before_file = hold
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(resolve, REPO)
        assert asked.wait(10)
        two = pool.submit(resolve, REPO, on_progress=second)
        assert one.result(20) == two.result(20)
    assert len(server.asked_for("model.safetensors")) == 1


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
