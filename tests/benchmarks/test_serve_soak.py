"""The soak of the server: a few seconds of it with a small model, and its detection of faults."""

import asyncio
import json
from random import Random

import pytest

from benchmarks.serve_soak import Seen, Soak, soak
from benchmarks.soak_plans import essence, garbage, plan
from benchmarks.soak_server import chatterm_server
from tests.benchmarks.small_model import small_model


def test_a_plan_is_the_same_each_time_and_all_kinds_come():
    plans = [plan(number, "tiny") for number in range(64)]
    assert plans == [plan(number, "tiny") for number in range(64)]
    assert len({found.kind for found in plans}) == 14
    assert not {"tools", "forced"} & {plan(number, "tiny", tools=False).kind for number in range(64)}


def test_garbage_is_bytes():
    assert len({garbage(Random(number), "tiny") for number in range(100)}) > 10


def chat(stream):
    return next(
        found
        for number in range(999)
        if (found := plan(number, "m")).kind == "chat" and found.streams is stream
    )


def test_the_essence_is_the_same_streamed_or_not():
    whole = {
        "choices": [{"index": 0, "message": {"content": "a b"}, "finish_reason": "stop", "logprobs": None}]
    }
    parts = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}
        for text, reason in (("a ", None), ("b", None), ("", "stop"))
    ]
    stream = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)
    found = essence(chat(True), stream + b"data: [DONE]\n\n")
    assert found == essence(chat(False), json.dumps(whole).encode())
    assert found[0]["text"] == "a b"
    with pytest.raises(ValueError, match="no end"):
        essence(chat(True), stream)


def test_what_has_grown_is_a_fault(capsys):
    class Quiet:
        def said(self):
            return "Traceback (most recent call last)"

    found = Soak(Quiet(), 1, 0)
    held = {"bytes": 0, "files": 10, "sockets": 4, "threads": 5}
    found.seen = Seen(held={"middle": {"web": held}, "end": {"web": held | {"files": 11, "bytes": 2**30}}})
    found.check()
    assert [fault.split()[0] for fault in found.seen.faults] == ["the", "the", "the"]
    capsys.readouterr()


def test_a_few_seconds_leave_nothing_and_say_nothing_wrong(smollm2, tmp_path):
    model = small_model("qwen3:0.6b", smollm2, tmp_path)
    with chatterm_server(str(model), "--max-running", "3", "--context", "512") as server:
        # The server waits 30 s for the rest of a request, which would be too long here.
        short = {"known": 6, "sampled": 3, "garbage_s": 2.0}
        seen = asyncio.run(soak(server, 3.0, 6, tools=False, tell=lambda text: None, **short))
    faults = [fault for fault in seen.faults if "has grown" not in fault]  # it has only just begun
    assert not faults
    assert seen.compared > 4
    assert seen.health_s
