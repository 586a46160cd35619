"""What real servers sent, trimmed: each is read as it was meant, however it is cut, and as far as it goes.

`vllm*` came from vLLM 0.32.0 with a model of random weights, `llama_cpp_python.sse` from the server of llama-cpp-python
0.3.34 with SmolLM2 135M, `chatterm*` from `chatterm serve`. What `*_calls*` say was prescribed to the models.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import FinishReason, ToolCall
from chatterm.backends.remote.address import Api
from chatterm.backends.remote.dialects.base import ListedModel
from chatterm.backends.remote.model_lookup import choose_dialect
from chatterm.backends.remote.stream_parser import AnswerReader
from tests.fresh import examples

FOLDER = Path(__file__).parent / "recorded"
RIVERS = ("hm so", "A river: Rhine.")

SAID: dict[str, tuple[str, str, FinishReason, tuple[int | None, ...]]] = {
    "chatterm.sse": (*RIVERS, FinishReason.EOS, (3, 1, 5)),
    "chatterm_responses.sse": (*RIVERS, FinishReason.EOS, (3, 1, 5)),
    "chatterm_ollama.ndjson": (*RIVERS, FinishReason.EOS, (3, None, 5)),
    "llama_cpp_python.sse": ("", "The river that I mentioned earlier", FinishReason.LENGTH, ()),
    "vllm.sse": ("", " fprintfดำเน aid古镇 morb", FinishReason.LENGTH, (16, 0, 5)),
}

CALLS = [ToolCall("add", '{"a": 20, "b": 22}'), ToolCall("add", '{"a": 2, "b": 3}')]
CALLED: dict[str, tuple[str, str, list[ToolCall]]] = {
    "chatterm_calls.sse": ("hm so", "Let me see.", CALLS),
    "chatterm_responses_calls.sse": ("hm so", "Let me see.", CALLS),
    "chatterm_ollama_calls.ndjson": ("hm so", "Let me see.", CALLS),
    # It says every part twice, in the old way and in the new one, with the name each time.
    "llama_cpp_python_calls.sse": ("", "", [ToolCall("add", '{ "a":20, "b":22}')]),
    "vllm_calls.sse": ("", "Let me see. ", CALLS),
    "vllm_responses_calls.sse": ("", "Let me see. ", CALLS),
}


def read(name: str, parts: list[bytes]) -> tuple[AnswerReader, str, str]:
    apis: dict[str, Api] = {"responses": "responses", "ollama": "ollama"}
    api = next((api for word, api in apis.items() if word in name), "chat")
    reader = AnswerReader(choose_dialect(api))
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.end()
    texts = [
        "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("reasoning", "answer")
    ]
    return reader, texts[0], texts[1]


@pytest.mark.parametrize("name", SAID)
def test_an_answer_as_it_was_sent(name: str) -> None:
    thought, answer, finish, counts = SAID[name]
    reader, *texts = read(name, [(FOLDER / name).read_bytes()])
    assert texts == [thought, answer]
    assert (reader.finish, reader.problem) == (finish, "")
    usage = reader.usage
    assert (() if usage is None else (usage.prompt, usage.cached, usage.generated)) == counts


@examples(40)
@given(st.sampled_from(sorted(SAID)), st.integers(0, 4000), st.integers(1, 400))
def test_an_answer_that_is_cut_off_says_as_much_as_came(name: str, end: int, size: int) -> None:
    whole = (FOLDER / name).read_bytes()
    data = whole[:end]
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    reader, thought, answer = read(name, parts)
    assert SAID[name][0].startswith(thought)
    assert SAID[name][1].startswith(answer)
    assert reader.problem == "" or "middle of the answer" in reader.problem
    if not reader.problem:
        assert (thought, answer) == SAID[name][:2]


@examples(40)
@given(st.sampled_from(sorted(CALLED)), st.integers(1, 400))
def test_calls_as_they_were_sent(name: str, size: int) -> None:
    data = (FOLDER / name).read_bytes()
    reader, thought, answer = read(name, [data[at : at + size] for at in range(0, len(data), size)])
    assert (thought.strip(), answer, reader.calls.made()) == CALLED[name]
    assert (reader.finish, reader.problem) == (FinishReason.EOS, "")


def test_thinking_that_the_token_limit_ended() -> None:
    for name, api in (("vllm_thinking.sse", "chat"), ("vllm_responses.sse", "responses")):
        reader = AnswerReader(choose_dialect(api))  # type: ignore[arg-type]
        pieces = [*reader.feed((FOLDER / name).read_bytes()), *reader.end()]
        assert {piece.kind for piece in pieces} == {"reasoning"}
        assert reader.finish is FinishReason.LENGTH
        assert reader.usage is not None
        assert reader.usage.generated == 5


def test_a_list_of_models() -> None:
    document = json.loads((FOLDER / "vllm_models.json").read_text("utf-8"))
    assert choose_dialect("chat").listed(document) == [ListedModel("tiny", 2048, "vllm")]
