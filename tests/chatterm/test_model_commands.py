"""pull, list, rm and show: what they print, and when they ask."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from chatterm.cli import models as model_commands
from chatterm.cli import show as show_command
from chatterm.cli.main import call
from engine.execute.compatibility import not_fused, not_native
from engine.machine.expected import NATIVE, PROGRAMS, Here
from engine.machine.shapes import CONFIGS, known_shape
from models.errors import ModelError
from models.families import registry
from models.families.registry import load_spec
from models.features import features
from models.files import ModelFiles
from models.hub.inspect import ModelFacts
from models.hub.sources import LocalModel
from models.progress import OnProgress, Progress
from models.units import bytes_text
from models.weights.slots import parameters
from tests.models.checkpoints import random_model, tiny_qwen3, write_gguf
from tests.models.families import FAMILIES
from tests.models.hub_server import HubServer
from tests.models.hub_world import CONFIG, FILES, REPO, server
from tests.models.known_configs import GPT_OSS
from tests.models.quantized_models import CASES
from tests.models.quantized_models import write as write_quantized

__all__ = ["server"]


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.machine.report.measure_bandwidth", lambda device: 1e10)


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
    monkeypatch.setattr(show_command, "resolve", resolve)
    monkeypatch.setattr(show_command, "describe", lambda _: facts)
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


@pytest.mark.parametrize("heads", [2, 8])
def test_show_says_by_what_a_model_is_computed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    heads: int,
) -> None:
    config = {"num_hidden_layers": 2, "vocab_size": 32, "hidden_size": 128, "intermediate_size": 64}
    config |= {"num_attention_heads": heads, "max_position_embeddings": 256, "sliding_window": 64}
    config |= {"architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path)
    monkeypatch.setattr("engine.kernels.native.library.problem", lambda: None)
    assert call(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    slow = "plain PyTorch, which is slower: there are no fused kernels for a head_dim of 16"
    assert "Runs here      yes" in shown
    assert "On the CPU     native kernels" in shown
    assert f"On a GPU       {slow if heads == 8 else 'fused kernels'}" in shown


@pytest.mark.parametrize(
    ("name", "held"), [("awq", "as Q4_1 on a CPU"), ("fp8, blocks", "in 16 bits (native")]
)
def test_show_says_how_a_checkpoint_is_quantized(
    name: str, held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantized(tmp_path, CASES[name])
    assert call(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"Quantised      {name.split(',')[0].replace('awq', 'AWQ')}, " in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("Held ")]
    assert held in line
    assert ("made for activations in fp8" in line) == (name == "fp8, blocks")
    assert f"Weights        {'INT4' if name == 'awq' else 'FP8'}, F32" in shown


def test_show_tells_which_experts_a_gpu_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3:30b-a3b"]))
    write_weights(tmp_path)
    program = PROGRAMS["fused kernels, CUDA graph"]
    here = Here(torch.device("cuda"), torch.bfloat16, program, False, 1e12, 24 * 10**9, 200 * 10**9)
    monkeypatch.setattr("engine.machine.report.look_here", lambda *_: here)
    monkeypatch.setattr("engine.execute.loading.packs", lambda dtype, device: None)
    assert call(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("Experts ")]
    assert re.search(r"those of \d\d of 48 layers in host memory \(\d\d GB\), computed on the CPU", line)
    assert "Speed          not known before it is loaded" in shown
    assert "too much" not in shown


def test_show_of_the_default_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "smollm2"]) == 0
    shown = capsys.readouterr().out
    for part in ("LlamaForCausalLM", "134.5 million", "8,192 tokens", "Q4_1", str(smollm2), "98 MB"):
        assert part in shown


def shown_of(model: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert call(["show", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:15].strip(): line[15:] for line in lines if not line.startswith(" ")}


@pytest.mark.parametrize("name", FAMILIES)
def test_show_of_every_family(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.kernels.native.library.problem", lambda: None)
    (tmp_path / "config.json").write_text(FAMILIES[name].to_json_string())
    write_weights(tmp_path)
    rows = shown_of(str(tmp_path), capsys)
    spec = load_spec(ModelFiles("x", folder=tmp_path))
    assert (rows["Runs here"], rows["Architecture"]) == ("yes", spec.architecture)
    found = [feature.value for feature in features(spec)]
    assert all(words in rows["Features"] for words in found)
    slow = {"On the CPU": not_native(spec), "On a GPU": not_fused(spec)}
    for label, reason in slow.items():
        assert rows[label] == ("native kernels" if label == "On the CPU" else "fused kernels") or (
            reason is not None and reason in rows[label]
        )
    assert rows["Memory"].startswith("weights ")
    assert "more for a conversation of" in rows["Memory"]
    assert rows["Speed"].endswith("PU")
    assert rows["Chat template"] == "no: it completes text"


@pytest.mark.parametrize("name", CONFIGS)
def test_show_of_the_shapes_of_the_catalogue(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    write_weights(tmp_path)
    here = Here(torch.device("cpu"), torch.bfloat16, PROGRAMS[NATIVE], True, 46e9, 10**12)
    monkeypatch.setattr("engine.machine.report.look_here", lambda *_: here)
    rows, spec = shown_of(str(tmp_path), capsys), known_shape(name)
    assert (rows["Runs here"], rows["Architecture"]) == ("yes", spec.architecture)
    assert rows["Memory"].startswith(f"weights {bytes_text(2 * parameters(spec))}, ")
    assert re.fullmatch(r"about [\d.,]+ tok/s on this CPU", rows["Speed"])


UNKNOWN = {
    "DeepseekV32ForCausalLM": (
        {"kv_lora_rank": 512, "n_group": 8, "index_topk": 2048, "vision_config": {"depth": 2}},
        "chatterm does not compute sparse attention by an index and images",
    ),
    "LagunaForCausalLM": (
        {"model_type": "laguna", "layer_types": ["sliding_attention", "full_attention"]},
        "chatterm does not compute a gate for the attention's output",
    ),
    "BertModel": ({"type_vocab_size": 2}, "chatterm does not compute an encoder"),
    "NewForCausalLM": ({"index_topk": None, "hidden_size": 8}, "chatterm does not know it"),
}


@pytest.mark.parametrize("architecture", UNKNOWN)
def test_an_unknown_architecture_is_refused_with_what_is_missing(
    architecture: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, why = UNKNOWN[architecture]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    write_weights(tmp_path)
    rows = shown_of(str(tmp_path), capsys)
    said = f"no: The architecture {architecture} is not supported: {why}. `chatterm show` lists what is supported."
    assert rows["Runs here"] == said
    assert "Speed" not in rows


def test_show_without_a_model_lists_what_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.strip() == line for line in lines)
    for family in registry.FAMILIES:
        known = (*family.architectures, family.gguf_architecture)
        words = [line.replace(",", "").split() for line in lines]
        (line,) = (line for line in words if known[0] in line)
        assert all(name in line for name in known if name is not None)


def test_show_of_a_model_on_the_hub_fetches_its_description_alone(
    server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = shown_of(REPO, capsys)
    assert (rows["Model"], rows["Architecture"], rows["Runs here"]) == (
        REPO,
        CONFIG["architectures"][0],
        "yes",
    )
    assert rows["Path"] == f"on the Hub; to download it: chatterm pull {REPO}"
    assert (rows["Chat template"], rows["Files"].split(",")[0]) == ("yes", str(len(FILES)))
    assert rows["Parameters"] == "0.0 million"
    asked = [request.path for request in server.requests if "/resolve/" in request.path]
    assert {path.rsplit("/", 1)[1] for path in asked} == {"config.json"}
    assert not (tmp_path / "hub").exists()


def test_show_of_quantized_experts_on_the_hub(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.repo("acme/oss", FILES | {"config.json": json.dumps(GPT_OSS).encode()})
    rows = shown_of("acme/oss", capsys)
    assert (rows["Architecture"], rows["Runs here"]) == ("GptOssForCausalLM", "yes")
    assert (rows["Weights"], rows["Parameters"]) == ("MXFP4", "20,914.8 million")


def test_show_of_a_gguf_file_on_the_hub_fetches_its_header_alone(
    server: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.hub.peek.HEADS", (100, 8192))
    path = write_gguf(tmp_path / "tiny.gguf", random_model(tiny_qwen3()))
    data = path.read_bytes()
    server.repo("acme/gguf", {"tiny.gguf": data})
    rows = shown_of("hf.co/acme/gguf/tiny.gguf", capsys)
    assert (rows["Architecture"], rows["Runs here"]) == ("Qwen3ForCausalLM", "yes")
    assert f"1, {bytes_text(len(data))}" == rows["Files"]
    monkeypatch.setattr("models.hub.peek.HEADS", (100,))
    assert call(["show", "hf.co/acme/gguf/tiny.gguf"]) == 1
    assert "download it first" in capsys.readouterr().err


def test_show_says_that_there_is_no_such_model(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "acme/none"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
