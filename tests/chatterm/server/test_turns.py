"""Clients take turns on the engine, programs and attached terminals alike, and nobody waits past a deadline."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from unittest.mock import patch

import pytest

from chatterm.backends.backend import ChatOptions, Message, Request
from chatterm.backends.failover import connect_to_server
from chatterm.backends.process import ProcessBackend
from chatterm.server.channel_service import ChannelService
from engine.cache.rows import Rows
from engine.schedule.sequence import Priority, Sequence
from tests.chatterm.server.conftest import Served
from tests.chatterm.server.test_channel_service import answers_of, asks, hold
from tests.counting import PATIENCE, until_true

SAMPLING = {"max_tokens": 3, "seed": 5}


@pytest.fixture
async def service(served: Served) -> AsyncIterator[ChannelService]:
    await asyncio.to_thread(hold, served)
    made = ChannelService()
    await made.connect()
    yield made
    await made.close()


@pytest.fixture
def arrived(served: Served, service: ChannelService) -> list[Sequence]:
    """The sequences that people wait for, as they come to the engine."""
    came: list[Sequence] = []
    submit = served.engine.submit

    def noted(sequence: Sequence) -> None:
        if sequence.priority is Priority.PERSON:
            came.append(sequence)
        submit(sequence)

    served.engine.submit = noted  # type: ignore[method-assign]
    return came


def remote() -> ProcessBackend:
    found = connect_to_server("terminal")
    assert found is not None
    backend = ProcessBackend(found[0], "tiny", ChatOptions(sampling=SAMPLING))
    backend.open()
    return backend


def by_client(sequences: list[Sequence]) -> dict[Hashable, list[Sequence]]:
    found: dict[Hashable, list[Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.client, []).append(sequence)
    return found


async def test_a_request_over_http_has_the_turn_of_its_client(
    service: ChannelService, arrived: list[Sequence]
) -> None:
    requests = [
        asks(client=client, messages=None, prompt=f"{client} {n}") for client in "aab" for n in range(3)
    ]
    await asyncio.gather(
        *(answers_of(service, request) for request in requests), answers_of(service, asks(count=4))
    )
    found = by_client(arrived)
    assert {name: len(group) for name, group in found.items()} == {"a": 6, "b": 3, None: 4}


async def test_what_a_terminal_asks_at_once_has_one_client_and_a_chat_is_nobody_elses(
    service: ChannelService, arrived: list[Sequence]
) -> None:
    def work() -> None:
        for _ in range(2):
            terminal = remote()
            asked = [Request([Message("user", f"River {n}?")], SAMPLING) for n in range(5)]
            list(terminal.answers(iter(asked)))
            list(terminal.send("Name a lake."))
            terminal.close()

    await asyncio.to_thread(work)
    found = by_client(arrived)
    assert len(found.pop(None)) == 2
    assert [len(group) for group in found.values()] == [5, 5]


async def test_a_terminal_comes_after_one_of_sixty_requests_of_a_program(
    service: ChannelService, served: Served
) -> None:
    scheduler = served.engine.pieces.scheduler

    def sooner() -> int:
        """All are there before anything is computed, the terminal's last."""
        busy = [question(served, number, "busy") for number in range(60)]
        terminals = question(served, 99)
        for sequence in (*busy, terminals):
            scheduler.add(sequence)
        count = sum(one.place < terminals.place for one in busy)
        for sequence in (*busy, terminals):
            scheduler.finish(sequence, None)
        return count

    assert await asyncio.to_thread(served.engine.loop.call, sooner) == 1


def question(served: Served, number: int, client: Hashable = None) -> Sequence:
    engine = served.engine
    params = engine.default_params()
    rows = Rows.of(engine.tokenizer.encode(f"question {number}"))
    return Sequence(rows, Priority.PERSON, params, engine.output(params), client=client)


async def test_who_waits_for_the_prompt_of_another_one_waits_no_longer_than_its_deadline(
    service: ChannelService, served: Served
) -> None:
    (held,) = served.calls.host.held
    never = question(served, 1)
    with patch.object(held.requests, "leader", return_value=never):
        answers = asyncio.ensure_future(answers_of(service, asks(deadline_s=0.05)))
        _, found = await asyncio.wait_for(answers, PATIENCE)
    assert (found[0]["ids"], found[0]["end"].reason) == ([], "length")
    assert held.waiting_for_prefix == []


async def test_who_leaves_while_it_waits_for_the_prompt_of_another_one_is_gone_at_once(
    service: ChannelService, served: Served
) -> None:
    (held,) = served.calls.host.held
    never = question(served, 1)
    with patch.object(held.requests, "leader", return_value=never):
        asked = asyncio.ensure_future(answers_of(service, asks()))
        await until_true(lambda: len(held.waiting_for_prefix) == 1)
        asked.cancel()
        await until_true(lambda: not held.waiting_for_prefix and not held.users and not held.sequences)


async def test_who_follows_another_answer_than_the_first_begins_too(
    service: ChannelService, served: Served
) -> None:
    (held,) = served.calls.host.held
    submit, late = served.engine.submit, list[Sequence]()
    with patch.object(
        served.engine, "submit", lambda one: late.append(one) if one.seed == 8 else submit(one)
    ):
        several = asyncio.ensure_future(answers_of(service, asks(count=2)))
        await until_true(lambda: bool(late))
    with patch.object(held.requests, "leader", return_value=late[0]):
        follows = asyncio.ensure_future(answers_of(service, asks(messages=None, prompt="Another one.")))
        await until_true(lambda: len(held.waiting_for_prefix) == 1)
    submit(late[0])
    _, found = await asyncio.wait_for(follows, PATIENCE)
    assert found[0]["ids"]
    await several


async def test_only_a_prompt_that_begins_as_another_one_asks_the_engine_about_it(
    service: ChannelService, served: Served
) -> None:
    (held,) = served.calls.host.held
    running = [question(served, 1), question(served, 2)]
    asked = [0]

    def cached(rows: Rows) -> int:
        asked[0] += 1
        return 0

    with patch.object(served.engine, "cached_rows", cached):
        for text, leader, times in (("else 3", None, 0), ("question 1", running[0], 1)):
            prompt = held.requests.completes(text * 3)
            assert (held.requests.leader(prompt, running), asked[0]) == (leader, times)
        running[0].finished.set()
        running[1].finished.set()
        assert (held.requests.leader(prompt, running), asked[0]) == (None, 1)
