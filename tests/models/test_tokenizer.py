"""Token ids: the same as llama.cpp's for GGUF metadata; special tokens, bad input, many threads, long texts."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, processors
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from models.errors import ModelError
from models.files import ModelFiles
from models.text.folder_tokenizer import parts_from_folder
from models.text.generation_config import generation_defaults
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.pieces import PromptPiece
from models.text.tokenizer import Tokenizer, load_tokenizer
from models.text.tokenizer_parts import END_OF_TURN, TO_THE_ANSWER, TokenizerParts
from tests.counting import calls_in, until
from tests.covering import each_value_once
from tests.models.tokenizer_data import golden, smollm2_file, smollm2_metadata, tiny, tiny_tokenizer


def metadata_of(vocabulary: str) -> dict[str, Any]:
    name, _, variant = vocabulary.partition(" ")
    if name == "smollm2":
        return smollm2_metadata()
    if variant == "unprefixed":
        return tiny(name) | {"tokenizer.ggml.add_space_prefix": False}
    return tiny(name) | ({"tokenizer.ggml.pre": variant} if variant else {})


SCORED = {"tokenizer.ggml.scores": [0.0] * len(tiny("tiny_bpe")["tokenizer.ggml.tokens"])}
WHOLE = re.compile(r"</?think>|<tool  call>|\[/?INST\]")
"""Tokens of the small vocabularies that are not special, but still control a model."""


@pytest.mark.parametrize("vocabulary", golden()["golden"])
def test_ids_are_those_of_llama_cpp(vocabulary: str) -> None:
    tokenizer = Tokenizer(parts_from_gguf(metadata_of(vocabulary)))
    rows = golden()["golden"][vocabulary]
    assert len(rows) == len(golden()["texts"]) > 70
    for text, (special, plain) in zip(golden()["texts"], rows, strict=True):
        assert tokenizer.encode(text) == special, text
        typed = tokenizer.encode_plain(text)
        if WHOLE.search(text):  # llama.cpp takes these as tokens even when they are typed
            assert all(map(tokenizer.is_text, typed)), text
        else:
            assert typed == (special if plain is None else plain), text


@pytest.mark.parametrize("vocabulary", ["smollm2", "tiny_bpe", "tiny_spm"])
def test_text_survives_the_round_trip(vocabulary: str) -> None:
    tokenizer = Tokenizer(parts_from_gguf(metadata_of(vocabulary)))
    for text in golden()["texts"]:
        if vocabulary == "tiny_spm" and re.search(r"\u2581|\[/?INST\]|<tool  call>", text):
            continue  # SentencePiece writes U+2581 for a space, and adds one after an added token
        assert tokenizer.decode(tokenizer.encode_plain(text), skip_special=False) == text


def test_a_missing_pre_tokenizer_is_the_default_one() -> None:
    metadata = tiny("tiny_bpe")
    del metadata["tokenizer.ggml.pre"]
    tokenizer = Tokenizer(parts_from_gguf(metadata))
    text = "1234 a==b"
    assert tokenizer.encode(text) == Tokenizer(parts_from_gguf(metadata_of("tiny_bpe default"))).encode(text)


def test_special_tokens_are_parsed_or_not() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), end]
    plain = tokenizer.encode_plain("a<|im_end|>")
    assert end not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"


def test_markers_that_are_not_special_are_text_when_typed() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert tokenizer.think_start == tokenizer.token_id("<think>") is not None
    assert tokenizer.think_end == tokenizer.token_id("</think>") is not None
    assert tokenizer.encode("<think>") == [tokenizer.think_start]
    assert tokenizer.decode([tokenizer.think_start]) == "<think>"
    assert tokenizer.think_start not in tokenizer.encode_plain("<think>")
    assert tokenizer.decode(tokenizer.encode_plain("<think>")) == "<think>"
    assert "<think>" not in tokenizer.special_strings


def test_special_tokens_have_no_text_unless_asked() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    unused = tiny("tiny_bpe")["tokenizer.ggml.tokens"].index("[UNUSED]")
    ids = [*tokenizer.encode("hi"), tokenizer.vocab_size, 10**6, -1, unused]
    assert tokenizer.decode(ids, skip_special=False) == "hi"


def test_token_id_knows_added_tokens_only() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert tokenizer.token_id("<|im_start|>") == tiny("tiny_bpe")["tokenizer.ggml.tokens"].index(
        "<|im_start|>"
    )
    assert tokenizer.token_id("the") is None
    assert tokenizer.token_id("") is None


def test_stop_ids_are_named_by_metadata_and_by_text() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert tokenizer.stop_ids == {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}
    assert tiny_tokenizer("tiny_spm").stop_ids == {2, tiny_tokenizer("tiny_spm").token_id("<|im_end|>")}


def test_a_token_that_looks_like_control_is_control_whatever_its_type() -> None:
    metadata = tiny("tiny_bpe")
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][end] = 1
    tokenizer = Tokenizer(parts_from_gguf(metadata))
    assert tokenizer.encode("<|im_end|>") == [end]
    assert end not in tokenizer.encode_plain("<|im_end|>")
    assert end in tokenizer.stop_ids


def test_a_piece_of_html_is_no_control_token() -> None:
    metadata = tiny("tiny_bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "</s>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer(parts_from_gguf(metadata))
    assert tokenizer.encode("</s>") == tiny_tokenizer("tiny_bpe").encode("</s>")
    assert tokenizer.stop_ids == tiny_tokenizer("tiny_bpe").stop_ids


def test_smollm2_as_a_model_file() -> None:
    tokenizer = load_tokenizer(ModelFiles("smollm2", gguf=smollm2_file()))
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.special_strings[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert tokenizer.think_start is None
    assert tokenizer.has_chat_template
    assert tokenizer.generation_defaults == {}


def test_smollm2_is_built_with_little_work() -> None:
    metadata = smollm2_metadata()
    calls = calls_in(lambda: Tokenizer(parts_from_gguf(metadata)))
    assert calls < 4 * len(metadata["tokenizer.ggml.tokens"]), "a few for each token at most"


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_a_bos_is_what_the_template_writes(tmp_path: Path, add: bool | None, written: str) -> None:
    """A file's settings for bos and eos apply to text without a template, which does not occur here."""
    template = written + "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    metadata = tiny("tiny_spm") | {"tokenizer.chat_template": template}
    rules = {} if add is None else {"add_bos_token": add, "add_eos_token": add}
    metadata |= {f"tokenizer.ggml.{rule}": value for rule, value in rules.items()}
    backend = parts_from_gguf(metadata).backend
    backend.post_processor = TemplateProcessing("<s> $0 </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **rules}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for parts in (parts_from_gguf(metadata), parts_from_folder(tmp_path)):
        tokenizer = Tokenizer(parts)
        text = tokenizer.render([{"role": "user", "content": "<s>Hi</s>"}], add_generation_prompt=False)
        typed = [
            PromptPiece(written.replace("{{ bos_token }}", "<s>"), typed=False),
            PromptPiece("<s>Hi</s>", typed=True),
        ]
        assert tokenizer.encode_pieces(typed).count(1) == bool(written)
        assert tokenizer.encode_pieces(typed).count(2) == 0
        assert (tokenizer.encode(text).count(1), tokenizer.encode(text).count(2)) == (1 + bool(written), 2)
        assert tokenizer.encode_plain("Hi") == tokenizer.encode("Hi")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are 'gpt2'"),
        ({"tokenizer.ggml.model": None}, "None; supported are 'gpt2'"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "supported are 'gpt2'"),
        ({"tokenizer.ggml.pre": ["qwen2"]}, "damaged"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2', which is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["not there"]}, "damaged"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "damaged"),
        ({"tokenizer.ggml.merges": [3]}, "damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "no type for every token"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "lists a token twice"),
        ({"tokenizer.ggml.model": "llama"}, "no score for every token"),
        ({"tokenizer.ggml.model": "t5"}, "no score for every token"),
        ({"tokenizer.ggml.model": "llama", **SCORED, "tokenizer.ggml.unknown_token_id": 10**6}, "damaged"),
        ({"tokenizer.ggml.model": "t5", **SCORED, "tokenizer.ggml.precompiled_charsmap": [1]}, "damaged"),
        ({"tokenizer.ggml.model": "t5", **SCORED, "tokenizer.ggml.precompiled_charsmap": ["a"]}, "damaged"),
        (
            {
                "tokenizer.ggml.model": "t5",
                "tokenizer.ggml.scores": ["a"] * len(SCORED["tokenizer.ggml.scores"]),
            },
            "damaged",
        ),
    ],
)
def test_bad_metadata_gets_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer(parts_from_gguf(tiny("tiny_bpe") | change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80" * 3])
def test_lone_surrogates_are_refused(text: str) -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(ModelError, match="not valid Unicode at character"):
            encode(text)


def test_parsing_and_plain_do_not_mix_across_threads() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    text = "some text <|im_end|> and more " * 20
    special, plain = tokenizer.encode(text), tokenizer.encode_plain(text)
    assert special != plain
    wrong: list[str] = []

    def work(*, parse: bool) -> None:
        for _ in range(150):
            ids = tokenizer.encode(text) if parse else tokenizer.encode_plain(text)
            if ids != (special if parse else plain):
                wrong.append("parsed" if parse else "plain")
            if tokenizer.decode(plain) != text:
                wrong.append("decoded")

    threads = [threading.Thread(target=work, kwargs={"parse": i % 2 == 0}) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_value_once
@pytest.mark.parametrize("vocabulary", ["tiny_bpe", "tiny_spm"])
@pytest.mark.parametrize("unit", ["Some words, 12 of them.\n", "a", " ", "\n ", "!?", "漢", "<|im_end|>"])
def test_long_texts_come_to_an_end(vocabulary: str, unit: str) -> None:
    """This takes a tenth of a second; anything quadratic would take hours."""
    tokenizer, ids = tiny_tokenizer(vocabulary), []
    text = unit * (300_000 // len(unit))
    Thread(target=lambda: ids.extend(tokenizer.encode_plain(text)), daemon=True).start()
    until(lambda: ids)
    assert tokenizer.decode(ids) == text


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a model folder with the small byte-level tokenizer; `files` are written by stem, as JSON or as text."""
    backend = parts_from_gguf(tiny("tiny_bpe")).backend
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    for stem, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.json").write_text(text, encoding="utf-8")
    return folder


def test_a_folder_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelFiles("tiny", folder=write_folder(tmp_path)))
    for text in golden()["texts"]:
        assert tokenizer.encode(text) == tiny_tokenizer("tiny_bpe").encode(text)
        assert tokenizer.encode_plain(text) == tiny_tokenizer("tiny_bpe").encode_plain(text)
    assert not tokenizer.has_chat_template
    assert tokenizer.generation_defaults == {}


def test_stop_ids_of_a_folder_come_from_all_its_files(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "[PAD]"}},
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5},
    )
    tokenizer = Tokenizer(parts_from_folder(folder))
    named = {tokenizer.token_id(text) for text in ("[PAD]", "<|im_end|>", "<|endoftext|>")}
    assert tokenizer.stop_ids == {3, 4, 5} | named


@pytest.mark.parametrize("end", sorted(END_OF_TURN))
def test_tokens_that_end_a_turn_do_so_where_they_are_special(end: str) -> None:
    for special in (True, False):
        backend = tokenizers.Tokenizer(BPE({"a": 0, end: 1}, []))
        backend.add_tokens([AddedToken(end, special=special)])
        made = Tokenizer(TokenizerParts(backend_with_decoder(backend), {}, frozenset(), None))
        assert made.stop_ids == ({1} if special else set())


@pytest.mark.parametrize("special", [True, False])
def test_in_the_harmony_format_one_message_is_no_turn(special: bool) -> None:
    texts = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<|end|>"]
    backend = tokenizers.Tokenizer(BPE({letter: at for at, letter in enumerate("asitnfl")}, []))
    for missing in ("<|start|>", None):
        added = [AddedToken(text, special=special) for text in texts if text != missing]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
        end = backend.token_to_id("<|end|>")
        made = Tokenizer(TokenizerParts(backend_with_decoder(backend), {}, frozenset({end}), None))
        assert (made.channels is None) == (end in made.stop_ids) == (missing is not None)
    assert made.channels is not None
    assert made.decode(made.channels.answer) == "final"
    assert made.decode(made.channels.closing, skip_special=False) == TO_THE_ANSWER
    assert not set(made.encode_plain(TO_THE_ANSWER)) & set(made.channels.steering)
    ends = {made.decode([id], skip_special=False) for id in made.stop_ids}
    assert ends == ({"<|return|>", "<|call|>"} if special else set())


@pytest.mark.parametrize(
    ("tokens", "template", "found"),
    [
        (["<think>", "</think>"], "", "<think>"),
        (["[THINK]", "[/THINK]"], "", "[THINK]"),
        (["<think>", "</think>", "[THINK]", "[/THINK]"], "", "<think>"),
        (["<think>", "</think>", "[THINK]", "[/THINK]"], "{{ '[THINK]' }}", "[THINK]"),
        (["<seed:think>", "</seed:think>"], "", "<seed:think>"),
        (["<|channel>", "<channel|>"], "", "<|channel>"),
        (["<think>", "[/THINK]"], "{{ '<think>' }}", None),
        ([], "<think></think>", None),
    ],
)
def test_think_markers_are_tokens_that_the_template_writes(
    tokens: list[str], template: str, found: str | None
) -> None:
    backend = tokenizers.Tokenizer(BPE({"é": 0}, []))
    backend.add_tokens([AddedToken(text, special=False) for text in tokens])
    made = Tokenizer(TokenizerParts(backend_with_decoder(backend), {}, frozenset(), template or None))
    assert (made.think_markers.open if made.think_markers is not None else None) == found
    assert (made.think_start is None) == (made.think_end is None) == (found is None)


def backend_with_decoder(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.decoder = decoders.ByteLevel()
    return backend


def test_a_text_to_complete_begins_with_bos_where_the_files_say_so(tmp_path: Path) -> None:
    plain, spm = tiny("tiny_bpe"), tiny("tiny_spm")
    bos = Tokenizer(parts_from_gguf(spm)).render([], add_generation_prompt=True)
    assert bos == spm["tokenizer.ggml.tokens"][spm["tokenizer.ggml.bos_token_id"]]
    assert parts_from_gguf(spm | {"tokenizer.ggml.add_bos_token": False}).text_start == ""
    assert parts_from_gguf(plain).text_start == ""
    folder = write_folder(tmp_path, tokenizer_config={"bos_token": "<|im_start|>"})
    assert parts_from_folder(folder).text_start == ""
    backend = parts_from_gguf(plain).backend
    first = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", first)])
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    assert parts_from_folder(folder).text_start == "<|im_start|>"


def test_tokenizer_config_adds_tokens(tmp_path: Path) -> None:
    size = tiny_tokenizer("tiny_bpe").vocab_size
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    folder = write_folder(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": {
                str(size + 1): {"content": "<two>", "special": False, **flags},
                str(size): {"content": "<one>", "special": True, **flags},
            },
            "additional_special_tokens": ["<think>", "<beyond>"],
        },
        config={"vocab_size": size + 2},
    )
    tokenizer = Tokenizer(parts_from_folder(folder))
    assert (tokenizer.token_id("<one>"), tokenizer.token_id("<two>")) == (size, size + 1)
    assert "<one>" in tokenizer.special_strings
    assert "<two>" not in tokenizer.special_strings
    assert "<think>" in tokenizer.special_strings
    # The model has no row for it.
    assert tokenizer.token_id("<beyond>") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer": "{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"generation_config": "[" * 100_000}, "generation_config.json is not valid JSON"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": 1}}}, "tokenizer_config.json"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "tokenizer_config.json"),
    ],
)
def test_damaged_folders_get_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer(parts_from_folder(write_folder(tmp_path, **files)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(ModelFiles("empty", folder=tmp_path))


def test_a_slow_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"no model at all")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be converted") as caught:
        load_tokenizer(ModelFiles("slow", folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    content = json.loads(write_folder(tmp_path).joinpath("tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    write_folder(tmp_path, tokenizer=content)
    with pytest.raises(ModelError, match=r"decoder \(WordPiece\) is not supported"):
        load_tokenizer(ModelFiles("wordpiece", folder=tmp_path))


def test_truncation_in_tokenizer_json_is_ignored(tmp_path: Path) -> None:
    content = json.loads(write_folder(tmp_path).joinpath("tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    write_folder(tmp_path, tokenizer=content)
    tokenizer = load_tokenizer(ModelFiles("truncating", folder=tmp_path))
    assert tokenizer.decode(tokenizer.encode("word " * 50)) == "word " * 50


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0,
                "pad_token_id": 1,
            },
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        ),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"temperature": None, "top_k": "40", "top_p": True, "min_p": float("nan")}, {}),
        ({"temperature": -1, "top_k": -5, "top_p": 0, "min_p": 2, "repetition_penalty": 0}, {}),
        ({"top_k": 50.0}, {"top_k": 50}),
    ],
)
def test_generation_defaults(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert generation_defaults(config) == expected


def test_loading_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    program = (
        "import sys; from pathlib import Path; from models.text.tokenizer import load_tokenizer;"
        "from models.files import ModelFiles; load_tokenizer(ModelFiles('x', folder=Path(sys.argv[1])));"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_texts_that_may_fit_are_told_by_their_length_and_their_beginning() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    text = "river " * 100
    count = len(tokenizer.encode_plain(text))
    assert tokenizer.may_fit([text], count)
    assert not tokenizer.may_fit([text], 1)
    assert not tokenizer.may_fit(["a"] * 1000, 1)
    assert not tokenizer.may_fit(["a b " * 1000], 100)
