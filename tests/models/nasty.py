"""Texts that tokenizers get wrong: all scripts, emoji, runs of spaces, numbers, code, control characters, noise."""

import os
import random
import sys
import unicodedata

from tests.models.tokenizer_data import golden

RANDOM = int(os.environ.get("NASTY_TEXTS", "300"))
"""The number of random texts; 10,000 for a manual run."""

_BITS = [
    *"aZé漢😀 ٣½²Ⅷǅʰßſıİ'\"!?.,;:-_/\\#$%^&*+=<>|~`()[]{}@\u0301\u0338\u200d\u200b\ufeff\u00a0\u3000\u2028\u0085",
    *(
        "\n",
        "\r\n",
        "\r",
        "\t",
        " ",
        "  ",
        "   ",
        " \n",
        "\n\n",
        "\x00",
        "\x1b",
        "\x7f",
        "\u2581",
        "\ue000",
        "\uffff",
    ),
    *(
        "'s",
        "'LL",
        "'Re",
        " the",
        "The",
        "camelCase",
        "HTTPServer",
        "ÅNGström",
        "1",
        "12",
        "123",
        "1234",
        "007",
        "3.14",
    ),
    *(
        "नमस्ते",
        "สวัสดี",
        "שלום",
        "مرحبا",
        "안녕",
        "こんにちは",
        "Привет",
        "ὄρνις",
        "Việt",
        "👩🏽‍💻",
        "🏳️‍🌈",
        "🇩🇪",
        "1️⃣",
    ),
    *(
        "</",
        "==",
        "!=",
        "->",
        "::",
        "//",
        "/*",
        "[INST]",
        "<s>",
        "</s>",
        "<unk>",
        "<0x0A>",
        "<|im_end|>",
        "<think>",
    ),
]


def nasty_texts(count: int = RANDOM) -> list[str]:
    """Return llama.cpp's texts of data/, letters of every block, runs of every length, and `count` random texts."""
    return [*golden()["texts"], *_letters(), *_runs(), *_random(count)]


def _letters() -> list[str]:
    """Return texts of sixteen characters: every 61st code point of Unicode that is assigned, and all below U+0300."""
    some = [*range(0x300), *range(0x300, sys.maxunicode + 1, 61)]
    letters = [chr(code) for code in some if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]
    return ["".join(letters[at : at + 16]) for at in range(0, len(letters), 16)]


def _runs() -> list[str]:
    units = ["7", " ", "\n", "\t", "\r\n", "a", "é", "!", "-", "=", "\u0301", "漢", "😀", "\u3000"]
    runs = [f"x{unit * length}y" for unit in units for length in range(1, 20)]
    return [*runs, *(unit * length for unit in units for length in (1, 2, 3, 33, 100))]


def _random(count: int) -> list[str]:
    chance = random.Random(15)
    texts = ["".join(chance.choices(_BITS, k=chance.randint(1, 30))) for _ in range(count // 2)]
    codes = [*range(0xD800), *range(0xE000, 0x20000)]
    return texts + [
        "".join(map(chr, chance.choices(codes, k=chance.randint(1, 30)))) for _ in range(count - count // 2)
    ]
