"""The same ids, text and prompts as transformers: Qwen3's own tokenizer, SmolLM2's GGUF, Llama's many classes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from models.text.folder_tokenizer import parts_from_folder
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.tokenizer import Message, Tokenizer
from tests.models.nasty import nasty_texts
from tests.models.tokenizer_data import (
    qwen3_folder,
    qwen3_metadata,
    smollm2_file,
    smollm2_metadata,
    tiny_backend,
)

CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": " Hi\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy\n"},
        {"role": "user", "content": "sure? <|im_end|> <think>x</think>"},
    ],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "e"},
    ],
]


def reference(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


def assert_same_ids(ours: Tokenizer, theirs: Any, texts: list[str], *, plain: bool = True) -> None:
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        if plain and not re.search(
            r"</?think>|<tool  call>|\[/?INST\]", text
        ):  # markers that are not special
            expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode_plain(text) == expected, text


@pytest.fixture(scope="module")
def qwen3() -> tuple[Tokenizer, Any]:
    return Tokenizer(parts_from_folder(qwen3_folder())), reference(qwen3_folder())


def test_qwen3_gives_the_ids_of_transformers(qwen3: tuple[Tokenizer, Any]) -> None:
    assert_same_ids(*qwen3, nasty_texts())


def test_qwen3_knows_its_special_tokens(qwen3: tuple[Tokenizer, Any]) -> None:
    ours, theirs = qwen3
    assert (ours.think_start, ours.think_end) == (151_667, 151_668)
    assert ours.stop_ids == {151_643, 151_645}
    assert set(theirs.all_special_tokens) <= set(ours.special_strings)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_qwen3_renders_as_transformers(
    qwen3: tuple[Tokenizer, Any], conversation: int, enable_thinking: bool | None, add_generation_prompt: bool
) -> None:
    ours, theirs = qwen3
    messages = CONVERSATIONS[conversation]
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )
    rendered = ours.render(
        messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
    )
    assert rendered == expected
    assert ours.encode(rendered) == theirs.encode(expected, add_special_tokens=False)


def test_qwen3_through_gguf_metadata_is_qwen3(qwen3: tuple[Tokenizer, Any]) -> None:
    folder = qwen3[0]
    ours = Tokenizer(parts_from_gguf(qwen3_metadata()))
    nfc = [text for text in nasty_texts() if "\u0301" not in text]
    # llama.cpp does not normalise: text that is not NFC has different ids in a GGUF file.
    nfc = [text for text in nfc if folder.decode(folder.encode(text), skip_special=False) == text]
    assert len(nfc) > 150
    for text in nfc:
        assert ours.encode(text) == folder.encode(text), text
    assert ours.stop_ids == folder.stop_ids
    assert (ours.think_start, ours.think_end) == (folder.think_start, folder.think_end)
    messages = CONVERSATIONS[2]
    assert ours.render(messages, add_generation_prompt=True) == folder.render(
        messages, add_generation_prompt=True
    )


def test_smollm2_gguf_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    path = smollm2_file()
    theirs = reference(path.parent, gguf_file=path.name)
    ours = Tokenizer(parts_from_gguf(smollm2_metadata()))
    # For a GGUF file, transformers loses the rule that each digit is a token; SmolLM2's own files have it.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = nasty_texts()
    assert_same_ids(ours, theirs, texts)
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            assert ours.render(messages, add_generation_prompt=prompt) == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
    theirs.save_pretrained(tmp_path)
    saved = Tokenizer(parts_from_folder(tmp_path))
    assert_same_ids(saved, theirs, texts[::4])
    assert saved.stop_ids == ours.stop_ids
    assert saved.render(CONVERSATIONS[1], add_generation_prompt=True) == ours.render(
        CONVERSATIONS[1], add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
        {"tokenizer_class": "LlamaTokenizer", "legacy": True},
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer", "model_type": "mistral"},
        {},
    ],
)
def test_sentencepiece_folders_as_transformers_reads_them(tmp_path: Path, config: dict[str, Any]) -> None:
    write_folder(tmp_path, parts_from_metadata("tiny_spm"), config)
    ours = Tokenizer(parts_from_folder(tmp_path))
    assert_same_ids(ours, reference(tmp_path), [*nasty_texts(), " lead", "a</s>b"])


@pytest.mark.parametrize(
    "tokenizer_class", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast"]
)
def test_byte_level_folders_as_transformers_reads_them(tmp_path: Path, tokenizer_class: str) -> None:
    backend = json.loads(parts_from_metadata("tiny_bpe"))
    # These classes imply GPT-2's own splitting.
    backend["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    write_folder(tmp_path, json.dumps(backend), {"tokenizer_class": tokenizer_class, "bos_token": None})
    ours = Tokenizer(parts_from_folder(tmp_path))
    assert_same_ids(ours, reference(tmp_path), nasty_texts())


def parts_from_metadata(name: str) -> str:
    content: str = tiny_backend(name).to_str()
    return content


def write_folder(folder: Path, tokenizer: str, config: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    known = {token["content"] for token in json.loads(tokenizer)["added_tokens"]}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if "<s>" in known else {}
    added = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in json.loads(tokenizer)["added_tokens"]
    }
    content = {**named, "added_tokens_decoder": added, **config}
    model_type = content.pop("model_type", "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
