"""The benchmark of long chats: all sides get the same input, and a peer with a cache computes the same results."""

import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from xml.etree import ElementTree

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.chart import Chart, Line, page
from benchmarks.multi_turn import KEPT, LLAMA, OURS, again_verdict, table, verdicts
from benchmarks.our_chat import OurChat
from benchmarks.peers.chats import KeptCache, LlamaCppChat, Recompute
from benchmarks.scripted_chat import MESSAGES, WAYS, follow_script, script, strokes, thinking_tokenizer
from engine import Engine, SamplingParams
from models.files import ModelFiles
from tests.benchmarks.small_model import small_model


def test_the_script_has_the_lengths_it_says_and_prompts_leave_the_thinking_out(smollm2: Path) -> None:
    tokenizer = thinking_tokenizer(smollm2)
    system, turns = script(tokenizer, 7, 40, 15, seed=3)
    assert (system, turns) == script(tokenizer, 7, 40, 15, seed=3)
    assert [len(turn.stream) for turn in turns] == [40 + 15 + 1] * 7
    lengths = [len(tokenizer.encode_plain(turn.user)) for turn in turns]
    assert lengths == [*MESSAGES, MESSAGES[0]]
    for before, after in pairwise(turns):
        # The next prompt continues with the answer, without its thinking.
        assert after.prompt[: len(before.prompt)] == before.prompt
        answer = before.stream[40:]
        assert after.prompt[len(before.prompt) :][: len(answer)] == answer
        assert tokenizer.think_start not in after.prompt


def test_a_varied_script_goes_back_and_to_other_branches(smollm2: Path) -> None:
    _, turns = script(thinking_tokenizer(smollm2), 12, 40, 15, seed=3, ways=WAYS)
    paths = [(), (0,), (0, 1), (0, 1), (0, 1, 3), (0,), (0, 5), (0, 5), (0, 5, 7), (0, 5, 6), (0, 5, 6, 9)]
    assert [turn.path for turn in turns] == [*paths, (0, 5, 6, 9, 10)]
    assert [turn.way for turn in turns] == list(WAYS[:12])
    retry, edit, switch = turns[3], turns[5], turns[9]
    assert (retry.user, retry.prompt, retry.new) == (turns[2].user, turns[2].prompt, 1)
    assert edit.prompt[: len(turns[0].prompt)] == turns[0].prompt
    assert switch.prompt[: len(turns[6].prompt)] == turns[6].prompt
    for turn in turns[1:]:
        if turn.way != "retry":
            # What is new is the message and the marks around it.
            assert 0 < turn.new < MESSAGES[-1] + 20


@pytest.mark.parametrize(
    ("model", "think_cache"), [("qwen3:0.6b", "exact"), ("qwen3.5:0.8b", "exact"), ("qwen3.5:0.8b", "mask")]
)
def test_nothing_is_computed_twice_whatever_a_person_does(
    model: str, think_cache: str, smollm2: Path, tmp_path: Path
) -> None:
    gguf = small_model(model, smollm2, tmp_path)
    system, turns = script(thinking_tokenizer(gguf), 20, 40, 15, seed=3, ways=WAYS)
    ours = OurChat(gguf, tmp_path, think_cache, 16, ahead=True, waits=True)
    try:
        ours.open(system)
        for turn in turns:
            found = ours.ask(turn, 0.0, 0.1)
            assert found["same"]
            assert found["computed"] <= turn.new, turn.way
    finally:
        ours.engine.close()


def test_the_engine_follows_the_script_and_is_asked_its_prompts(smollm2: Path) -> None:
    params = SamplingParams(temperature=0.0)
    engine = Engine.load(ModelFiles("smollm2", gguf=smollm2), device="cpu", context=512)
    engine.tokenizer = thinking_tokenizer(smollm2)
    scripted = follow_script(engine, 16)
    try:
        system, turns = script(engine.tokenizer, 2, 40, 15, seed=3)
        chat = engine.chat(system=system)
        for turn, ahead in zip(turns, (params, None), strict=True):
            scripted.answer = turn.stream
            chat.prepare(turn.user, wait=True, params=ahead)
            began = perf_counter()
            events = chat.send(turn.user, params)
            next(events)
            asked = chat._asked
            assert asked is not None
            list(events)
            assert chat.last is not None
            assert chat.last.token_ids == turn.stream
            assert chat.history.token_ids[: len(turn.prompt)] == turn.prompt
            assert chat.last.stats.prompt_tokens == len(turn.prompt)
            assert (chat.last.stats.prefilled_tokens == 0) is (ahead is not None)
            assert chat.last.stats.prefilled_tokens <= 16
            computed = scripted.rows_between(began, asked.first_token)
            assert computed == chat.last.stats.prefilled_tokens
    finally:
        engine.close()


def test_a_message_grows_by_one_stroke_at_a_time_until_enter() -> None:
    message = "pasted, then typed"
    times, drafts = zip(*strokes(message, 2.0, 5.0), strict=True)
    assert drafts[-1] == message
    assert drafts[0] == message[:-9]
    assert [len(after) - len(before) for before, after in pairwise(drafts)] == [1] * 9
    assert times[-1] == pytest.approx(1.8)
    assert [draft for _, draft in strokes("hi", 2.0, 5.0)] == ["h", "hi"]


def tiny_network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def test_a_kept_cache_computes_what_parts_and_ends_as_a_fresh_one() -> None:
    network = tiny_network()
    anew, kept = Recompute(network), KeptCache(network)
    first, stream = list(range(10)), [40, 41, 42, 43, 44]
    assert (anew.ask(first).computed, kept.ask(first).computed) == (10, 10)
    kept.hear(stream)
    second = [*first, 43, 44, 20, 21]  # the thinking 40 41 42 is left out
    assert anew.ask(second).computed == 14
    assert kept.ask(second).computed == 4
    assert kept.ask(second).computed == 1  # the logits of the last token are needed
    fresh = KeptCache(network)
    fresh.ask(second)
    for mine, theirs in zip(kept._cache.layers, fresh._cache.layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(mine.values, theirs.values, atol=1e-5)


def test_a_missing_llama_cpp_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be run: No such file") as missing:
        LlamaCppChat(tmp_path / "python", tmp_path / "model.gguf", 64, 1)
    assert "\n" not in str(missing.value)
    python = Path(sys.executable)
    with pytest.raises(RuntimeError) as broken:
        LlamaCppChat(python, tmp_path / "model.gguf", 64, 1)
    assert "\n" not in str(broken.value)


def test_verdicts() -> None:
    computed = {OURS: [[7, 8, 9], [7, 8, 16]], KEPT: [[30, 200, 200]], LLAMA: [[30, 200, 190]]}
    found = verdicts(computed, {OURS: [0.5, 0.02, 0.03]})
    assert [reached for _, _, reached in found] == [False, True, True]
    assert found[0][1].startswith("1.50 times")
    assert found[1][1] == "16 at most, in turn 3 of chat 2"
    assert found[2][1] == "31 where llama.cpp computes 420, 13.5 times fewer"
    found = verdicts({OURS: [[0, 0], [0, 17]], LLAMA: [[0, 169]]}, {OURS: [0.5, 0.001, 0.0012]})
    assert [reached for _, _, reached in found] == [False, False, False], "the worst of all counts"
    found = verdicts({OURS: [[0, 0]], LLAMA: [[3, 40]]}, {OURS: [0.5, 0.02]})
    assert [reached for _, _, reached in found] == [True, True, True]
    assert found[2][1] == "0 where llama.cpp computes 43"
    assert "40 tok" in table({OURS: [40]}, {OURS: [None]})
    assert "1 retry " in table({OURS: [40]}, {OURS: [None]}, ["retry"])
    _, told, reached = again_verdict({OURS: [[0, 0], [0, 1]], LLAMA: [[150, 1400]]})
    assert (told, reached) == ("1 in a chat; llama.cpp 1,550", False)
    assert again_verdict({OURS: [[0, 0]]})[2]


def test_the_picture_is_valid_and_nothing_lies_outside() -> None:
    lines = [Line("a <b>", "#123456", [0.0, 10.0, 2000.0]), Line("c", "#654321", [3.0, None, 5.0])]
    root = ElementTree.fromstring(page("title & more", [Chart("one", lines), Chart("two", lines)], "below"))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 * (3 + 2)
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height
