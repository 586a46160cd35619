"""Calibrated quantisation: a smaller error, files that load as measured, and no half-written files."""

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Phi3Config

import models.quantizing.quantize as quantizing
from chatterm.cli.main import call
from models.errors import ModelError
from models.hub.inspect import describe
from models.hub.manifest import manifest_path, read_manifest
from models.hub.verify import verify
from models.loading.load import fill_network, load_model
from models.loading.plan import Target, plan_tensors, read_tensors
from models.network import Weight
from models.progress import Progress
from models.quantizing.activations import divergence, measure, places
from models.quantizing.calibrate import calibrate, windows
from models.quantizing.fit import fit
from models.quantizing.quantize import quantize_model
from models.weights.block_formats import Kind
from models.weights.formats.blocks import dequantize
from models.weights.gguf import read_gguf
from models.weights.matching import match
from models.weights.quantize import quantize
from tests.models.checkpoints import (
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import tiny_qwen3_moe

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 160,
}
SMALL = tiny_llama(**SIZES)


class Words:
    """A tokenizer of bytes, for models without one."""

    def encode(self, text: str) -> list[int]:
        return [byte % 150 for byte in text.encode()][:400]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "load_tokenizer", lambda files: Words())


def outliers(model: Any) -> Any:
    """Make some channels of the residual stream much larger than others, as in trained networks."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, ::16] *= 12
    return model


@pytest.mark.parametrize("whole", [False, True])
def test_a_fit_is_better_where_it_matters(whole: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, 8, 32, generator=generator)
    squares = torch.rand(8, 32, generator=generator).square() * 10 + 0.01
    fitted = fit(values, squares, whole)
    assert fitted.digits.min() >= 0
    assert fitted.digits.max() <= 15
    if whole:
        zero = -fitted.low / fitted.scale
        assert torch.equal(zero.round(), zero.round().clamp(0, 15))
        assert (zero - zero.round()).abs().max() < 1e-3
    plain = quantize(values.flatten(1), Kind.Q4_1).view(50, 8, 20)
    out = torch.empty(50, 256)
    dequantize(plain.view(50, -1), Kind.Q4_1, out)

    def error(numbers: torch.Tensor) -> float:
        return float(((numbers.view(values.shape) - values).square() * squares).sum())

    assert error(fitted.numbers) < error(out) * (1.1 if whole else 0.95)


def test_blocks_of_one_number_are_that_number() -> None:
    for value in (0.0, 1.5, -2.0):
        for whole in (False, True):
            fitted = fit(torch.full((2, 1, 32), value), torch.ones(1, 32), whole)
            assert (fitted.numbers - value).abs().max() <= 1e-3 * abs(value)


def test_gradients_tell_what_a_small_error_changes() -> None:
    """The predicted divergence equals the one caused by noise on a matrix."""
    network = load_network(SMALL)
    texts = [[(7 * i * i + j) % 150 for i in range(1, 129)] for j in range(3)]
    found = measure(network, texts)
    generator = torch.Generator().manual_seed(1)
    for place, linear in list(places(network))[:4]:
        inputs, outputs = found.inputs(place), found.outputs(place)
        assert inputs is not None
        assert outputs is not None
        noise = (
            torch.randn(linear.rows, linear.columns, generator=generator) * 0.01 * float(linear.weight.std())
        )
        predicted = float((noise.square() * inputs).sum(1) @ outputs)
        before = linear.weight.clone()
        plain = load_network(SMALL)
        linear.weight.add_(noise)
        measured = divergence(plain, network, texts)
        linear.weight.copy_(before)
        assert 0.3 < predicted / measured < 3.0, place


def load_network(config: Any) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        outliers_model = outliers(random_model(config))
        outliers_model.save_pretrained(path)
        return load_model(files_of(path), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("config", [SMALL, tiny_qwen3_moe(hidden_size=128, moe_intermediate_size=64)])
def test_calibrated_weights_are_nearer_than_those_of_the_option(config: Any, tmp_path: Path) -> None:
    outliers(random_model(config)).save_pretrained(tmp_path)
    spec, tensors, names, _ = read_tensors(files_of(tmp_path))
    found = match(spec, tensors, names)
    plan = plan_tensors(spec, tensors, Target(torch.float32, CPU), names)
    network = fill_network(plan)
    known, unknown = windows([(i * i + 3 * i) % 150 for i in range(1500)])
    held = calibrate(tensors, found, measure(network, known), whole=False)
    option = load_model(files_of(tmp_path), dtype=torch.float32, device=CPU, quantize="int4")
    ours = quantizing._in_blocks(plan, held)
    assert ours.nbytes <= option.nbytes
    assert divergence(network, ours, unknown) < divergence(network, option, unknown)


def write(tmp_path: Path, kind: str) -> Path:
    if kind == "folder":
        outliers(random_model(SMALL)).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        return tmp_path / "model"
    return write_gguf(tmp_path / "model.gguf", outliers(random_model(SMALL)), {})


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_is_written_loads_as_what_was_measured(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path, kind)
    out = tmp_path / ("small.gguf" if kind == "gguf" else "small")
    reports: list[Progress] = []
    written = quantize_model(files_of(source), out, "0" * 40, reports.append)
    manifest = read_manifest(out)
    assert manifest == written.manifest
    assert manifest is not None
    assert (manifest.source, manifest.revision, manifest.format) == (
        source.name,
        "0" * 40,
        "int4, calibrated",
    )
    assert verify(str(out)).is_good
    assert {report.what for report in reports} == {"activations", "weights"}
    assert reports[-1].done == reports[-1].total
    plain = load_model(files_of(source), dtype=torch.float32, device=CPU)
    loaded = load_model(files_of(out), dtype=torch.float32, device=CPU)
    assert {w.format for w in loaded.parts(Weight)} == {Kind.Q4_1, Kind.Q8_0}
    assert {part.name for part in tmp_path.iterdir() if part.name.startswith(".")} == set()
    _, unknown = windows(Words().encode(quantizing.TEXT.read_text(encoding="utf-8")))
    assert manifest.kl == pytest.approx(divergence(plain, loaded, unknown), rel=0.05)
    with pytest.raises(ModelError, match="already exists"):
        quantize_model(files_of(source), out)
    with pytest.raises(ModelError, match="quantised already"):
        quantize_model(files_of(out), tmp_path / f"again{out.suffix}")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_is_written_has_the_usual_modes(kind: str, tmp_path: Path) -> None:
    source, out = write(tmp_path, kind), tmp_path / ("out" if kind == "folder" else "out.gguf")
    before = os.umask(0o027)
    try:
        quantize_model(files_of(source), out)
    finally:
        os.umask(before)
    made = [*out.parent.glob("out*"), *out.glob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in made}
    assert modes == {path.name: 0o750 if path.is_dir() else 0o640 for path in made}
    assert len(modes) > 1


def test_what_most_weights_are_stored_as_is_told(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType
    kinds = {"token_embd": types.Q8_0} | dict.fromkeys(("attn_q", "attn_output", "ffn_up"), types.Q4_1)
    path = write_gguf(tmp_path / "model.gguf", random_model(SMALL), kinds)
    for failing in (
        lambda: quantize_model(files_of(path), tmp_path / "out.gguf"),
        lambda: load_model(files_of(path), dtype=torch.float32, device=CPU, quantize="int4"),
    ):
        with pytest.raises(ModelError, match=r"quantised already \(Q4_1\)"):
            failing()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written_stays(
    kind: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, kind)
    before = {path.name for path in tmp_path.iterdir()}
    out = tmp_path / ("small.gguf" if kind == "gguf" else "small")
    expected = ModelError if isinstance(error, OSError) else KeyboardInterrupt
    name = f"write_{kind}"
    whole = getattr(quantizing, name)

    def at_the_end(source: Path, target: Path, held: Mapping[str, Any], *rest: Any) -> None:
        whole(source, target, held, *rest)
        raise error

    monkeypatch.setattr(quantizing, name, at_the_end)
    with pytest.raises(expected):
        quantize_model(files_of(source), out)
    assert {path.name for path in tmp_path.iterdir()} == before
    monkeypatch.setattr(quantizing, name, whole)

    def manifest(path: Path, _: Any) -> None:
        raise error

    monkeypatch.setattr(quantizing, "write_manifest", manifest)
    with pytest.raises(expected):
        quantize_model(files_of(source), out)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gguf = write(tmp_path, "folder"), write(tmp_path, "gguf")
    for source, out, said in (
        (folder, tmp_path / "a.gguf", "a folder"),
        (gguf, tmp_path / "a", "OUT.gguf"),
        (folder, tmp_path / "none" / "a", "no folder"),
    ):
        with pytest.raises(ModelError, match=said):
            quantize_model(files_of(source), out)
    monkeypatch.setattr(quantizing, "measure", None)
    packed = Phi3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=160,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    one = write_checkpoint(tmp_path / "one", packed)
    odd = write_checkpoint(tmp_path / "odd", tiny_qwen3())
    for source, said in ((odd, "blocks of 32"), (one, "shares a tensor with others")):
        with pytest.raises(ModelError, match=said):
            quantize_model(files_of(source), tmp_path / "out")
    assert not manifest_path(tmp_path / "out").exists()


def test_a_context_shorter_than_a_window(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", tiny_llama(**SIZES, max_position_embeddings=48))
    assert quantize_model(files_of(source), tmp_path / "out").manifest.kl is not None


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", tiny_llama(**SIZES | {"vocab_size": 100}))
    with pytest.raises(ModelError, match=r"has token \d+, but the network only has tokens 0 to 99"):
        quantize_model(files_of(source), tmp_path / "out")


@pytest.mark.parametrize(
    ("out", "named"), [("a b", "'a b'"), ("smollm2", "./smollm2"), ("-x", "./-x"), ("q", "q")]
)
def test_the_next_step_is_told_as_it_is_typed(
    out: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "folder")
    monkeypatch.chdir(tmp_path)
    assert call(["quantize", str(source), "--", out]) == 0
    assert f"chatterm run {named}; to check its files: chatterm verify {named}\n" in capsys.readouterr().out


def test_two_at_once_do_not_write_into_each_other(tmp_path: Path) -> None:
    source, out = write(tmp_path, "gguf"), tmp_path / "small.gguf"
    tried: list[str] = []

    def meanwhile(_: Progress) -> None:
        if not tried:
            with pytest.raises(ModelError, match="Another chatterm quantize is writing") as refused:
                quantize_model(files_of(source), out)
            tried.append(str(refused.value))

    quantize_model(files_of(source), out, on_progress=meanwhile)
    assert tried
    assert verify(str(out)).is_good


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_came_to_the_place_meanwhile_is_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path, kind), tmp_path / ("small.gguf" if kind == "gguf" else "small")
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(
        quantizing, "need_space", lambda *_: out.mkdir() if kind == "folder" else out.write_text("mine")
    )
    with pytest.raises(ModelError, match="already exists"):
        quantize_model(files_of(source), out)
    assert {path.name for path in tmp_path.iterdir()} == before | {out.name}
    assert list(out.iterdir()) == [] if kind == "folder" else out.read_text() == "mine"


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    source, out = write(tmp_path, "folder"), tmp_path / "small"
    left = tmp_path / ".small.partial"
    left.mkdir()
    (left / "model-old.safetensors").write_bytes(b"half")
    quantize_model(files_of(source), out)
    assert not left.exists()
    assert not (out / "model-old.safetensors").exists()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, end = write(tmp_path, kind), ".gguf" if kind == "gguf" else ""
    monkeypatch.setattr(quantizing, "measure", None)
    link = tmp_path / f"link{end}"
    link.symlink_to("nowhere")
    for out, said in (
        (Path(f"/proc/small{end}"), "cannot be written"),
        (tmp_path / f"{'x' * 201}{end}", "too long"),
        (tmp_path / ("x" * 300) / f"small{end}", "File name too long"),
        (tmp_path / f"a\nb{end}", "control characters"),
        (link, "already exists"),
    ):
        with pytest.raises(ModelError, match=said):
            quantize_model(files_of(source), out)
    assert link.is_symlink()


def test_a_disk_that_fills_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write(tmp_path, "folder"), tmp_path / "small"

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\); nothing was left"):
        quantize_model(files_of(source), out)
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


@pytest.mark.parametrize(
    ("name", "factor", "said"),
    [
        ("model.norm.weight", float("nan"), "output is not a number.*damaged"),
        ("model.layers.0.mlp.up_proj.weight", 1e8, "larger than 65,504"),
    ],
)
def test_numbers_that_no_network_has_are_told(name: str, factor: float, said: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", SMALL)
    tensors = load_file(source / "model.safetensors")
    tensors[name] *= factor
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        quantize_model(files_of(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path, "folder"), tmp_path / "small"
    assert call(["quantize", str(source), str(out)]) == 0
    printed = capsys.readouterr()
    assert "nats a token" in printed.out
    assert "Quantising weights" in printed.err
    assert call(["verify", str(out)]) == 0
    (out / "model.safetensors").write_bytes(b"x" + (out / "model.safetensors").read_bytes()[1:])
    assert call(["verify", str(out)]) == 1
    assert "damaged  model.safetensors" in capsys.readouterr().out
    assert call(["quantize", str(source), str(out)]) == 1
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 3])
def test_any_part_of_a_gguf_file_names_the_whole(number: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model(SMALL), {}, most_tensors=10)
    (source,) = tmp_path.glob(f"m-0000{number}-of-*.gguf")
    quantize_model(files_of(source), tmp_path / "out.gguf")
    assert load_model(files_of(tmp_path / "out.gguf"), dtype=torch.float32, device=CPU)


def aligned(path: Path, alignment: int) -> Path:
    """Write a GGUF file again, with its tensors at multiples of `alignment`."""
    read = gguf.GGUFReader(path)
    out = path.with_name("aligned.gguf")
    writer = gguf.GGUFWriter(out, "llama")
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_custom_alignment(alignment)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_tensors_that_are_aligned_otherwise(tmp_path: Path) -> None:
    source = aligned(write(tmp_path, "gguf"), 256)
    found = quantize_model(files_of(source), tmp_path / "out.gguf")
    loaded = load_model(files_of(tmp_path / "out.gguf"), dtype=torch.float32, device=CPU)
    plain = load_model(files_of(source), dtype=torch.float32, device=CPU)
    assert divergence(plain, loaded, [list(range(100))]) < 10 * (found.manifest.kl or 0)


def test_an_empty_list_is_left_out(tmp_path: Path) -> None:
    source, key = write(tmp_path, "gguf"), b"x.listed"
    raw = source.read_bytes()
    entry = struct.pack("<Q8sIIQ", len(key), key, 9, 8, 0)  # 32 bytes, which keep the alignment
    count = int.from_bytes(raw[16:24], "little") + 1
    source.write_bytes(raw[:16] + count.to_bytes(8, "little") + entry + raw[24:])
    quantize_model(files_of(source), tmp_path / "out.gguf")
    assert key.decode() not in read_gguf(tmp_path / "out.gguf").metadata


def test_other_weights_and_an_old_manifest_are_not_copied(tmp_path: Path) -> None:
    source, out = write(tmp_path, "folder"), tmp_path / "out"
    for name in ("pytorch_model.bin", "old.gguf", "chatterm.manifest.json", "LICENSE"):
        (source / name).write_text("{}")
    quantize_model(files_of(source), out)
    names = {path.name for path in out.iterdir()}
    assert "LICENSE" in names
    assert not names & {"pytorch_model.bin", "old.gguf"}
    assert verify(str(out)).is_good


def test_numbers_in_4_and_in_8_bits_are_counted(tmp_path: Path) -> None:
    source, out = write(tmp_path, "folder"), tmp_path / "out"
    assert quantize_model(files_of(source), out).kept > 0
    plain, small = describe(files_of(source)), describe(files_of(out))
    assert small.parameters == plain.parameters
    assert {name for name, _ in small.dtypes} >= {"INT4", "INT8"}
