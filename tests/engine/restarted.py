"""Run as a program: for every line on standard input (JSON: a conversation, and how far it is) a fork goes on with it,
with a tier on disk, until it is killed.

The fork writes its process id; then a line before and after every answer; in the end "done".
"""

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from traceback import format_exc
from typing import Any

import tokenizers  # noqa: F401 - whatever is imported here, a fork need not import
import torch

from engine.cache.host_memory import PromptCosts
from engine.conversation.turns import Answer, Turn
from engine.engine import Engine
from engine.events import FinishReason
from engine.store.identity import of_code
from tests.counting import until

CONTEXT = 1000
WRITING, READING = 1, 2
"""What the byte that is shared says of the moment."""


def load(model: str, options: dict[str, str], disk: Path | None = None) -> Engine:
    torch.set_num_threads(1)
    return Engine.load(model, device="cpu", context=CONTEXT, threads=1, disk=disk, disk_gb=1, **options)  # type: ignore[arg-type]


def played(engine: Engine, talk: dict[str, Any], said: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """One answer of a conversation of which so much was said: as JSON has it, with the bits that it was drawn from."""
    step = talk["steps"][number]
    chat = engine.chat(talk["system"], think_cache=talk["think_cache"])
    chat.owner = talk["name"]
    path: list[dict[str, Any]] = []
    for before, one in zip(talk["steps"], said, strict=False):
        path = [*path[: before["keep"]], one]
    chat.load([turn_of(one) for one in path[: step["keep"]]])
    if step["reads"] is not None:
        chat.settle()
        sleep(step["reads"])
    for end in step["typed"]:
        chat.prepare(step["text"][:end])
    closes = engine.tokenizer.token_id("</think>")
    params = engine.default_params(**step["params"], logit_bias={closes: 2.0}, logprobs=1)
    told = [(event.token_id, event.logprob) for event in chat.send(step["text"], params)]
    chat.settle()
    assert chat.last is not None
    answer = chat.last
    return {
        "user": step["text"],
        "opening": chat.turns[-1].opening,
        "told": told,
        "answer": {
            "text": answer.text,
            "reasoning": answer.reasoning,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
        },
    }


def turn_of(one: dict[str, Any]) -> Turn:
    answer = dict(one["answer"])
    answer["finish_reason"] = FinishReason(answer["finish_reason"])
    return Turn(one["user"], Answer(**answer), list(one["opening"]))


def tell(line: object) -> None:
    """One line, whole."""
    data = (json.dumps(line) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


def watched(
    shared: mmap.mmap, moment: int, work: Callable[..., int], piece: int, pause: float, *given: Any
) -> int:
    """`work` on a file, by pieces where `piece` is not 0; the shared byte says that it is going on."""
    fd, data, at, *flags = given
    shared[0] = moment
    if piece:
        sleep(pause)
        data = [data[0][:piece]] if isinstance(data, list) else data[:piece]
    done = work(fd, data, at, *flags)
    shared[0] = 0
    return done


def live(order: dict[str, Any]) -> None:
    tell(os.getpid())
    with Path(order["shared"]).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 1)
    slow = order["piece"], order["pause"]
    os.pwrite = partial(watched, shared, WRITING, os.pwrite, *slow)  # type: ignore[assignment]
    os.preadv = partial(watched, shared, READING, os.preadv, *slow)  # type: ignore[assignment]
    PromptCosts.worth_it = property(lambda self: True)  # type: ignore[assignment,method-assign]
    talk, said = order["talk"], order["said"]
    engine = load(order["model"], talk["options"], Path(order["store"]))
    disk_tier = engine.disk
    assert disk_tier is not None
    if order["waits"]:
        until(lambda: disk_tier._folder is not None)
    for number in range(len(said), len(talk["steps"])):
        tell("asks")
        said.append(played(engine, talk, said, number))
        if order["waits"]:
            until(lambda: not engine.loop.call(lambda: disk_tier.has_writes))
        disk = engine.figures().disk
        assert disk is not None
        tell(
            {
                **said[-1],
                "restored": disk.restored_tokens,
                "written": disk.written_tokens,
                "problem": disk.problem,
            }
        )
        sleep(talk["steps"][number]["pause"])
    tell("done")
    signal.pause()


def main() -> None:
    of_code()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                live(json.loads(line))
            except BaseException:  # noqa: BLE001 - whoever waits must hear of it
                tell({"failed": format_exc()})
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
