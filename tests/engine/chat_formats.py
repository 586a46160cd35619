"""Chat templates of the families that there are, and small tokenizers of every kind to write them with."""

import functools
import json

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from engine.conversation.prompt import PromptFormat
from engine.conversation.tools import to_messages
from engine.conversation.turns import Answer, Turn
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import META_SPACE, TokenizerParts, sentencepiece_decoder
from tests.engine.tiny import TEMPLATE
from tests.models.tokenizer_data import tiny_backend

_SYSTEM_IN_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = false %}{% endif %}{% for m in messages %}"
)
TEMPLATES = {
    "llama2": _SYSTEM_IN_USER
    + "{% if loop.first and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "vicuna": "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
    "{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "plain": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ 'Bot: ' + m['content'] | trim }}"
    "{% else %}{{ m['role'] + ': ' + m['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot:' }}{% endif %}",
    "mistral1": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token + ' ' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    "mistral3": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "lfm2": "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "qwen3": TEMPLATE,
    "phi3": "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "granite": "{% for m in messages %}"
    "{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    "hunyuan": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<start_of_turn>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|start_header_id|>' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '<|end_header_id|>' }}{% endif %}{% endfor %}"
    "{{ '<|start_header_id|>' if add_generation_prompt else '<end_of_turn>' }}",
}
ERNIE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""Its prompts end in a space, which the tokens of a text would have in one with the first word of the answer."""
MARKERS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *("<|eot_id|>", "<s>", "</s>", "<think>", "</think>", "<tool_call>"),
]
"""What steers; the last three are not special."""
TOKENIZERS = [
    "bytes",
    "gguf",
    "prepend",
    "always",
    "first",
    "never",
    "split",
    "unprefixed gguf",
    "strict mistral",
]


def names_of(kind: str) -> dict[str, str]:
    """Other texts for the markers, which nobody types."""
    texts = [*MARKERS, "<unk>", *(["[INST]", "[/INST]"] if kind == "strict mistral" else [])]
    return {text: f"\u27e6{index}\u27e7" for index, text in enumerate(texts)}


@functools.cache
def backend(kind: str, *, renamed: bool = False) -> tokenizers.Tokenizer:
    """A small tokenizer of this kind; `renamed`: with the `names_of` its markers."""
    names = names_of(kind) if renamed else {}
    data = json.loads(tiny_backend("tiny_bpe" if kind == "bytes" else "tiny_spm").to_str())
    data["added_tokens"] = []
    vocab = data["model"]["vocab"]
    for index, text in enumerate(("[INST]", "[/INST]", "<tool  call>")):
        if text in vocab:
            vocab[f"\ue0a0{index}"] = vocab.pop(text)  # no hole among the ids: transformers numbers them anew
    data["model"]["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "".join(pair) in vocab]
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    if kind == "unprefixed gguf":
        made.normalizer = normalizers.Replace(" ", META_SPACE)
        made.decoder = sentencepiece_decoder(prefixed=False)
    elif kind not in ("bytes", "gguf", "prepend"):
        scheme = kind if kind in ("always", "first", "never") else "first"
        made.normalizer = None
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            META_SPACE, prepend_scheme=scheme, split=kind == "split"
        )
        made.decoder = sentencepiece_decoder(prefixed=scheme != "never")
    markers = [*MARKERS, *(["[INST]", "[/INST]"] if kind == "strict mistral" else [])]
    for text in markers:
        token = AddedToken(names.get(text, text), special=text not in MARKERS[-3:], normalized=False)
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    made.add_tokens([AddedToken("\n\n", special=False, normalized=False), AddedToken("zz", normalized=False)])
    return made


def special_tokens(names: dict[str, str] | None = None) -> dict[str, str]:
    """What templates know by name."""
    return {"bos_token": (names or {}).get("<s>", "<s>"), "eos_token": (names or {}).get("</s>", "</s>")}


def tokenizer_of(kind: str, template: str) -> Tokenizer:
    """The same as the engine has it; `template` is a name, or the template itself."""
    made = backend(kind)
    return Tokenizer(TokenizerParts(made, special_tokens(), frozenset(), TEMPLATES.get(template, template)))


def said(ids: list[int], text: str) -> Answer:
    """An answer that was sampled."""
    return Answer(text, token_ids=ids, shown=(0, len(ids)))


def segments(
    format: PromptFormat,
    system: str | None,
    users: list[str],
    answers: list[Answer],
    *,
    generate: bool,
    think: bool | None = None,
) -> list[list[int]]:
    """The tokens before, between and after the answers: of a prompt for an answer to the last of the users' messages,
    or without `generate` of what the next prompt begins with."""
    messages, turns = to_messages(system, list(map(Turn, users, answers)), users[-1] if generate else None)
    return format.encode(format.dialogue(messages, turns, think, before_next=not generate))
