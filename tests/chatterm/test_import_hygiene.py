"""What a command must not import, proven in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    *("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "gguf", "numpy", "jinja2"),
    *("mcp", "httpx", "httpx2", "llguidance"),
)
OURS = ("chatterm", "engine", "models")


def imported(code: str, *arguments: str) -> set[str]:
    """The modules that are imported once `code` ran in a fresh process."""
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"], ["run", "-p", ""]]
)
def test_the_command_line_imports_no_model_code(arguments: list[str]) -> None:
    found = imported("from chatterm.cli.main import main; main()", *arguments)
    assert "typer" in found
    assert found.isdisjoint({*HEAVY, "textual"})
    if "--help" in arguments:  # importing is nearly all that it does: so much may it be
        assert len(found) <= 500, sorted(found)
        ours = {name for name in found if name.partition(".")[0] in OURS}
        assert len(ours) <= 24, sorted(ours)


MODULES = ["chatterm.backends.local", "chatterm.cli.oneshot", "chatterm.cli.models", "chatterm.cli.doctor"]


@pytest.mark.parametrize("module", MODULES)
def test_a_command_starts_without_torch(module: str) -> None:
    found = imported(f"import {module}")
    assert "models" in found
    assert found.isdisjoint({"torch", "transformers", "textual"})


def test_show_looks_at_headers_alone(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64}
    config |= {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    found = imported("from chatterm.cli.main import main; main()", "show", str(tmp_path))
    assert "engine.execute.compatibility" in found
    assert found.isdisjoint({"triton", "transformers"})


def test_the_screen_stands_before_torch_is_there() -> None:
    found = imported("import chatterm.app")
    assert "textual" in found
    assert found.isdisjoint({"torch", "transformers", "numpy"})
