"""Common parts of the Hub tests: a small model on a loopback Hub, and an empty cache."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from models.hub import download_common, transfer
from tests.counting import PATIENCE
from tests.models.hub_server import HubServer

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
    "tekken.json": b"{ }",
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
        monkeypatch.setattr(download_common, "REPORT_EVERY_S", 0.0)
        monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "chatterm"))
        running.repo(REPO, FILES | USELESS)
        yield running


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_python(program: str, **environment: str) -> str:
    """Return the output of a program run by a fresh interpreter with these environment variables added."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def cache_of(repo: str = REPO) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def sharded(shards: int) -> dict[str, bytes]:
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    index = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}).encode()
    small = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    return small | {"model.safetensors.index.json": index} | {name: name.encode() * 100 for name in names}
