"""Prompts are the ids that transformers gives for the whole rendered conversation, with every kind of tokenizer."""

from random import Random
from typing import Any

import pytest

from engine.conversation.prompt import PromptFormat
from engine.conversation.turns import Answer
from models.text.tokenizer import Message, PromptPiece
from tests.engine.chat_formats import (
    ERNIE,
    MARKERS,
    TEMPLATES,
    TOKENIZERS,
    backend,
    names_of,
    said,
    segments,
    special_tokens,
    tokenizer_of,
)

ROUNDS = 3
WORDS = [
    *(
        "a",
        "the",
        "and",
        " ",
        "  ",
        "\n",
        "\n\n",
        ".",
        "!",
        "12",
        "345",
        "naïve",
        "漢字",
        "🙂",
        "x = [1]",
        "zz",
        "'s",
    ),
    *("e\u0301", "\ue0ff", "<", ">", "[", "INST", "</", "USER:", "|"),
]
TYPED = [*WORDS, "\u2581", "\u2581the"]  # an answer's tokens cannot tell U+2581 from a space
CONTROL = [*MARKERS, "[INST]", "[/INST]", "<unk>", "<|im_end|>\n<|im_start|>system\n", "</s><s>[INST]"]


def reference(kind: str, template: str, *, renamed: bool = False) -> Any:
    """transformers with the same tokenizer; `renamed`: the markers have other texts, so that nobody can type them."""
    transformers = pytest.importorskip("transformers")
    names = names_of(kind) if renamed else {}
    source = TEMPLATES[template]
    for text, name in names.items():
        source = source.replace(text, name)
    if renamed:  # the template asks whether the answer holds this, and leaves out what stands before it
        source = source.replace(
            f"message.content.split('{names['</think>']}')", "message.content.split('</think>')"
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend(kind, renamed=renamed), chat_template=source, **special_tokens(names)
    )


def ids_of(theirs: Any, messages: list[Message], *, generate: bool = False) -> list[int]:
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    ids: list[int] = theirs.encode(text, add_special_tokens=False)
    return ids


def random_text(rng: Random, words: list[str], size: int = 8) -> str:
    return "".join(rng.choices(words, k=rng.randint(1, size)))


def spoken(asked: list[int], whole: list[int], text: str, decode: Any) -> Answer | None:
    """The answer as a model would sample it that was trained on what transformers gives; None where it has no tokens
    of its own that spell it (SentencePiece with an added token in the middle).
    """
    assert whole[: len(asked)] == asked
    rest = whole[len(asked) :]
    for count in range(1, len(rest) + 1):
        if decode(rest[:count], goes_on=True).strip() == text:
            return said(rest[:count], decode(rest[:count]))
    return None


def flat(segments: list[list[int]], answers: list[Answer]) -> list[int]:
    ids = list(segments[0])
    for answer, segment in zip(answers, segments[1:], strict=True):
        ids += answer.content_ids + segment
    return ids


def conversation(rng: Random, template: str, words: list[str]) -> tuple[str | None, list[str], list[str]]:
    has_system = template not in ("mistral1", "mistral3") and rng.random() < 0.5
    system = random_text(rng, words) if has_system else None
    users = [random_text(rng, words).strip() or "and?" for _ in range(rng.randint(2, 4))]
    users[-1] = f" {users[-1]}\n"
    answers = [random_text(rng, WORDS, 5).strip() or "yes" for _ in users[1:]]
    return system if system and system.strip() else None, users, answers


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("typed", ["words", "control"])
def test_a_conversation_is_what_transformers_makes_of_it(kind: str, template: str, typed: str) -> None:
    ours = tokenizer_of(kind, template)
    theirs = reference(kind, template, renamed=typed == "control")
    format = PromptFormat(ours)
    rng = Random(f"{kind} {template} {typed}")
    compared = 0
    for _ in range(ROUNDS):
        words = TYPED if typed == "words" else [*TYPED, *CONTROL, *CONTROL]
        system, users, texts = conversation(rng, template, words)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        answers: list[Answer] = []
        for user, text in zip(users, [*texts, ""], strict=True):
            messages.append({"role": "user", "content": user})
            asked = flat(segments(format, system, users[: len(answers) + 1], answers, generate=True), answers)
            assert asked == ids_of(theirs, messages, generate=True), messages
            if text:
                messages.append({"role": "assistant", "content": text})
                more: Message = {"role": "user", "content": "x"}
                answer = spoken(asked, ids_of(theirs, [*messages, more]), text, ours.decode)
                if answer is None:
                    break
                answers.append(answer)
                compared += 1
    assert compared


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_history_goes_on_from_a_prompt_that_ends_in_a_space(kind: str) -> None:
    """Whole, the text would have other tokens there; what was computed counts."""
    tokenizer = tokenizer_of(kind, ERNIE)
    format = PromptFormat(tokenizer)
    users, answers, before = ["one"], list[Answer](), list[int]()
    for text in ("the end", "and", "\u6f22"):
        asked = flat(segments(format, "system", users, answers, generate=True), answers)
        assert asked[: len(before)] == before
        ids = tokenizer.encode_pieces([PromptPiece(text, typed=True)], asked[-1])
        before = asked + ids
        assert tokenizer.decode(before).endswith(f"Assistant: {text}")
        answers.append(said(ids, text))
        users.append(" the next ")
