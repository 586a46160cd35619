"""A model without a chat template: it goes on from the text as it stands."""

import io
import json
from pathlib import Path

import pytest
import torch

from chatterm.backends.backend import ChatOptions, Exchange, FinishReason
from chatterm.backends.local import LocalBackend
from chatterm.cli.main import call
from engine.conversation.prompt import COMPLETES
from models.text.gguf_tokenizer import parts_from_gguf
from tests.models.checkpoints import reference_model, write_checkpoint
from tests.models.families import tiny_gpt2
from tests.models.tokenizer_data import tiny

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 in small, as the Hub has it: no chat template."""
    folder = tmp_path_factory.mktemp("gpt2")
    backend = parts_from_gguf(tiny("tiny_bpe")).backend
    write_checkpoint(folder, tiny_gpt2(vocab_size=backend.get_vocab_size(), n_positions=2048))
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    return folder


def test_a_prompt_is_completed_as_it_stands(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    ids = parts_from_gguf(tiny("tiny_bpe")).backend.encode(TEXT, add_special_tokens=False).ids
    assert call(["run", str(folder), "-p", TEXT, "--temperature", "0", "--max-tokens", "8", "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["stats"]["prompt_tokens"] == len(ids)
    assert answer["finish_reason"] == "length"
    assert COMPLETES in shown.err
    assert shown.err.count("completes text") == 1


def test_a_conversation_is_one_text(folder: Path) -> None:
    backend = LocalBackend(
        str(folder), ChatOptions(device="cpu", dtype="float32", sampling={"temperature": 0.0})
    )
    backend.open()
    try:
        assert (backend.info.thinks, COMPLETES in backend.figures().notes) == (False, True)
        list(backend.send(TEXT))
        first = backend.last
        assert (first.finish_reason, first.stats.generated_tokens) == (FinishReason.LENGTH, 256)
        assert backend.begin_title(TEXT, first.text) is False
        backend.configure({"sampling": {"temperature": 0.0, "max_tokens": 4}})
        list(backend.send(" and then"))
        text = backend.engine.tokenizer.encode_plain
        ids = [*text(TEXT), *first.token_ids, *text(" and then")]
        assert backend.last.stats.prompt_tokens == len(ids)
        model = reference_model(folder)
        whole = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert backend.last.token_ids == whole[0, len(ids) :].tolist()
        assert backend.last.stats.prefilled_tokens == len(text(" and then")) + 1
        kept = [Exchange(1, None, TEXT, first.text, model="x", finish_reason="length")]
        backend.load_path(kept)
        list(backend.send(" and then"))
    finally:
        backend.close()
