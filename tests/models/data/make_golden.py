"""Makes golden_tokens.json: what llama.cpp makes of many texts, with several vocabularies and splits.

    python tests/models/data/make_golden.py SMOLLM2.gguf

Needs llama-cpp-python beside the packages of the project. tiny_bpe.json and tiny_spm.json, two small
vocabularies as GGUF metadata, are made first when they are missing.
"""

import argparse
import inspect
import json
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
from llama_cpp import Llama  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).parent
SPLITS = ("default", "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken")

TEXTS = [
    "",
    " ",
    "Hello",
    " Hello",
    "Hello, world! How are you today?",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say we've got what she'd want; it's John's.",
    "I'M SURE THEY'LL SAY WE'VE GOT WHAT SHE'D WANT; IT'S JOHN'S.",
    "don''t 'tis 'S x's 'll'll",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(12))\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * 0x1F;\n}\n",
    '{"key": [1, 2.5, -3e10, null, true], "s": "a\\nb"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "SELECT * FROM t WHERE a>=1 AND b<>'it''s';",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "0 1 12 123 1234 12345 123456 1234567890 00000000000000000000",
    "3.14159265358979 1,000,000 -42 +7 1e-10 0b101 7th 2nd",
    "²³¹ ½¾ Ⅷ ٣٤٥ १२३ ４５６ 𝟙𝟚𝟛 ㉑",
    "a  b   c    d     e      f",
    "        eight spaces, then text",
    "trailing spaces        ",
    "\ttab\t\ttwo tabs\t \t mixed \t",
    "line\nline\n\nline\n\n\nline\n\n\n\n",
    "carriage\r\nreturn\r\n\r\nline\rfeed\n\r",
    " \n \n  \n\t\n",
    "\n",
    "\r\n",
    "a\u00a0b\u2003c\u3000d\u1680e\u0085f\u2028g\u2029h",
    "\x00",
    "nul\x00in\x00the\x00middle",
    "\x01\x02\x07\x08\x1b[31mred\x1b[0m\x7f\x80\x9b",
    "naïve café über Straße Ångström İstanbul ſ K",
    "e\u0301 a\u0300\u0301 n\u0303 \u0301 \u0301\u0302lone",
    "Zalgo: h\u0335\u0301e\u0334\u0300l\u0336\u0302l\u0337\u0303o\u0338\u0308",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε — ὄρνις",
    "你好，世界！今天天气怎么样？",
    "日本語のテキスト。カタカナ、ひらがな、漢字。",
    "안녕하세요 세계, 오늘은 어때요?",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Việt Nam: tiếng Việt có dấu",
    "Vie\u0302\u0323t (decomposed)",
    "\u200b\u200c\u200d\u2060\ufeff zero width",
    "\u202eright to left override\u202c",
    "😀 😃😄 emoji",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪🇫🇷 1️⃣ ❤️",
    "🤷🏿‍♂️🤷🏿‍♂️🤷🏿‍♂️",
    "math: ∑∫√∞≈≠≤≥ ℝ ℵ₀ → ⇒ 𝔘𝔫𝔦",
    "box: ┌─┐│└┘ █▓▒░ ◆◇",
    "“quotes” ‘single’ «guillemets» — – … ·",
    "$100 €50 £20 ¥1000 100% #tag @user a_b_c a-b-c a/b/c a\\b",
    "!!! ??? ... ,,, ;;; ::: --- ___ *** ``` ~~~ ^^^ ||| +++ === <<< >>>",
    "!\n?\r\n/\n ;\n",
    "\ue000\uf8ff private \U000e0001\U0010ffff\ufffd\ufffe",
    "\U00020000\U0002a6d6 \U0001f600\U0001d400",
    "pneumonoultramicroscopicsilicovolcanoconiosis " * 3,
    "a" * 600,
    "ab" * 300 + "!" * 100,
    " " * 300 + "x",
    "\n" * 100,
    "漢" * 200,
    "😀" * 50,
    "9" * 250,
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|im_end|><|im_end|>",
    "<|im_end",
    "|im_end|>",
    "<|endoftext|>",
    "<think>\nhmm\n</think>\n\nyes <think></think>",
    "< think > <Think> <think",
    "<s>Hello</s> <unk> <0x41> <s",
    "[INST] Hi [/INST] ok",
    "<tool  call>x<tool  call> y",
    "<|im_start|><|im_start|> <|im_end|>",
    "▁under ▁ ▁▁ line▁",
    "Ġ Ċ ĉ Ġthe Â ł",
    "[PAD] [EMPTY_3] IMG",
]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("smollm2", type=Path)
    smollm2: Path = parser.parse_args().smollm2
    for name, make in (("tiny_bpe", tiny_bpe), ("tiny_spm", tiny_spm)):
        path = DATA / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(make(), ensure_ascii=True, indent=0), encoding="utf-8")
    bpe = json.loads((DATA / "tiny_bpe.json").read_text(encoding="utf-8"))
    spm = json.loads((DATA / "tiny_spm.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        files = {"smollm2": smollm2}
        for split in SPLITS:
            files[f"tiny_bpe {split}"] = write_gguf(Path(folder), bpe | {"tokenizer.ggml.pre": split})
        files["tiny_spm"] = write_gguf(Path(folder), spm)
        files["tiny_spm unprefixed"] = write_gguf(
            Path(folder), spm | {"tokenizer.ggml.add_space_prefix": False}
        )
        golden = {name: tokenize(path) for name, path in files.items()}
    header = textwrap.dedent(f"""\
        Token ids by llama.cpp (llama-cpp-python {version("llama-cpp-python")}), made with make_golden.py.
        golden[vocabulary] has, for each of texts, the ids with special tokens parsed, then the ids of
        plain text or null where they are the same.""").replace("\n", " ")
    text = json.dumps({"how": header, "texts": TEXTS, "golden": golden}, separators=(",", ":"))
    (DATA / "golden_tokens.json").write_text(text.replace("],[[", "],\n[[") + "\n", encoding="utf-8")


def tokenize(path: Path) -> list[list[list[int] | None]]:
    """For each text: [ids with special tokens parsed, ids as plain text or None where they are the same]."""
    llama = Llama(model_path=str(path), vocab_only=True, verbose=False)
    rows: list[list[list[int] | None]] = []
    for text in TEXTS:
        data = text.encode("utf-8")
        special = llama.tokenize(data, add_bos=False, special=True)
        plain = llama.tokenize(data, add_bos=False, special=False)
        rows.append([special, None if plain == special else plain])
    return rows


def write_gguf(folder: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file that holds a vocabulary and no weights."""
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def training_texts() -> list[str]:
    """Text in many scripts with the habits of code: this file and some of Python's own."""
    digits = [f"{i} {i * 37} {i * 4099}" for i in range(400)]
    texts = [text for text in TEXTS if "\x00" not in text]  # llama.cpp reads tokens as C strings
    return [*texts, inspect.getsource(argparse), inspect.getsource(textwrap), *digits]


def tiny_bpe() -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE vocabulary that also merges digits, spaces and line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=8,
        show_progress=False,
    )  # fmt: skip
    words = [word for text in training_texts() for word in pieces(text)]
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD]"]
    whole = ["<think>", "</think>", "<tool  call>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *control, *whole, "[UNUSED]"],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), *[3] * len(control), *[4] * len(whole), 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.ggml.padding_token_id": len(tokens) + 3,
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_spm() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE vocabulary with byte tokens, laid out like Llama 2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=900, limit_alphabet=150, max_token_length=10, show_progress=False
    )
    words = [word for text in training_texts() for word in pieces(text)]
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    normal = list(dict.fromkeys([*merged, *letters]))
    whole = ["[INST]", "[/INST]", "<tool  call>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *normal, *whole, "<|im_end|>"],
        "tokenizer.ggml.scores": [
            *[0.0] * 259,
            *[-float(rank) for rank in range(len(normal))],
            *[0.0] * (len(whole) + 1),
        ],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(normal), *[4] * len(whole), 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }


def pieces(text: str) -> list[str]:
    """Cuts of three words each, so that the trainer also sees what spans words."""
    words = text.split(" ")
    return [" ".join(words[start : start + 3]) for start in range(0, len(words), 3)]


if __name__ == "__main__":
    main()
