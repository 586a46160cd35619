"""Which model drafts for which: it is found, compared, measured against the memory, and a line says where it cannot."""

import json
from pathlib import Path

import pytest

from benchmarks.repeating import write_repeating
from engine import Engine, SamplingParams
from engine import engine as engine_module
from engine.kernels.native import library as native
from engine.machine import drafts
from models.errors import ModelError
from models.hub.catalogue import drafts_for
from models.hub.sources import LocalModel, local_files

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, speculation="auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")
    write_repeating(folder / "large")
    write_repeating(folder / "small", hidden=32, seed=1)
    write_repeating(folder / "other", hidden=32)
    path = folder / "other" / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    (marker,) = [token for token in found["added_tokens"] if token["content"] == "<think>"]
    marker["content"] = "<reason>"
    path.write_text(json.dumps(found), encoding="utf-8")
    return folder


def load(folder: Path, draft: str | None, **options: object) -> Engine:
    path = str(folder / "large")
    return Engine.load(path, device="cpu", quantize="int8", draft=draft, **{"context": 512, **options})  # type: ignore[arg-type]


def notes_of(folder: Path, draft: str, **options: object) -> list[str]:
    """What is said of drafts; the engine answers, whatever that is."""
    engine = load(folder, draft, **options)
    try:
        assert engine.figures().speculation == "suffix matching"
        assert engine.figures().draft_bytes == 0
        assert list(engine.stream(engine.tokenizer.encode("the old keeper"), GREEDY))
        return [note for note in engine.figures().notes if "draft model" in note]
    finally:
        engine.close()


def test_a_draft_model_is_loaded_beside_the_model(folder: Path) -> None:
    engine = load(folder, None)
    try:
        plain, alone = list(engine.stream([5, 6, 7], GREEDY)), engine.figures()
    finally:
        engine.close()
    engine = load(folder, str(folder / "small"))
    try:
        figures = engine.figures()
        assert figures.speculation.startswith("suffix matching, draft model small (")
        assert 0 < figures.draft_bytes < figures.weight_bytes + figures.kv_bytes
        assert (figures.weight_bytes, figures.kv_bytes) == (alone.weight_bytes, alone.kv_bytes)
        assert list(engine.stream([5, 6, 7], GREEDY)) == plain
    finally:
        engine.close()
    assert not engine.figures().draft_bytes


def test_one_with_another_tokenizer_is_left_out_with_a_line(folder: Path) -> None:
    (note,) = notes_of(folder, str(folder / "other"))
    assert note == (
        "No draft model is used: the tokenizer of other is different (special token 259 is '<reason>' and not "
        "'<think>'); choose a draft model of the same family."
    )


def test_one_for_which_there_is_no_memory_is_left_out_with_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda device: 2_000_000)
    (note,) = notes_of(folder, str(folder / "small"), context=None)
    assert note.startswith("No draft model is used: small and the KV caches need ")
    assert note.endswith("MB of memory, and 1.9 MB are free.")


def test_auto_takes_what_is_here_and_fetches_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = notes_of(folder, "auto")
    assert note == "No draft model is used: the catalogue has none for large; name one with --draft."
    monkeypatch.setattr("engine.draft.drafts_for", lambda name: ["qwen3:0.6b-q8", "qwen3:0.6b"])
    (note,) = notes_of(folder, "auto")
    assert (
        note == "No draft model is used: none for large is on this machine; run: chatterm pull qwen3:0.6b-q8"
    )
    monkeypatch.setattr("engine.draft.drafts_for", lambda name: ["qwen3:0.6b-q8", str(folder / "small")])
    engine = load(folder, "auto")
    try:
        assert "draft model small" in engine.figures().speculation
    finally:
        engine.close()


def test_one_that_is_not_there_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no file or folder \./nowhere"):
        load(folder, "./nowhere")


def test_pairs_on_this_machine_are_found_with_what_they_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [LocalModel(name, local_files(folder / name), 1, "hub") for name in ("large", "small")]
    monkeypatch.setattr(drafts, "local_models", lambda: here)
    monkeypatch.setattr(
        drafts, "drafts_for", lambda name: ["qwen3:0.6b", str(folder / "small")][: 2 * (name == "large")]
    )
    (pair,) = drafts.draft_pairs("cpu")
    assert (pair.model, pair.draft, pair.fits) == ("large", "small", True)
    assert 0 < pair.weight_bytes < 1_000_000
    assert pair.kv_bytes > 0


@pytest.mark.parametrize("name", ["qwen3:8b", "qwen3:8b-q4", "Qwen/Qwen3-8B"])
def test_the_catalogue_knows_which_model_drafts_for_which(name: str) -> None:
    assert drafts_for(name) == ["qwen3:0.6b-q8", "qwen3:0.6b"]
    assert drafts_for("smollm2") == []
