"""The queue in front of the engine: fair, bounded, and nothing is lost of it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.http.limits import AdmissionQueue, Limits
from chatterm.server.service import RequestError
from tests.fresh import examples


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_clients_take_turns_however_many_requests_one_has():
    gate = AdmissionQueue(Limits(running=1))
    order = []

    async def ask(client):
        async with gate.turn(client, 1):
            order.append(client)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for client in ["a"] * 4 + ["b"] * 2 + ["c"]:
            group.create_task(ask(client))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]
    assert (gate.running, gate.waiting) == (0, 0)


async def test_more_than_may_wait_are_told_when_to_come_back():
    gate = AdmissionQueue(Limits(running=1, waiting=1))
    async with gate.turn("a", 1):
        waits = asyncio.ensure_future(gate.turn("a", 1).__aenter__())
        await settle()
        with pytest.raises(RequestError) as caught:
            await gate.turn("b", 1).__aenter__()
        assert caught.value.status == 429
        assert caught.value.retry_after_s >= 1
        assert gate.waiting == 1
    assert await waits >= 0


async def test_who_waits_too_long_is_told_so():
    gate = AdmissionQueue(Limits(running=1, queue_s=0.01))
    async with gate.turn("a", 1):
        with pytest.raises(RequestError) as caught:
            await gate.turn("b", 1).__aenter__()
        assert caught.value.status == 429
        assert gate.waiting == 0


async def test_who_waits_is_told_when_the_server_stops():
    gate = AdmissionQueue(Limits(running=1))
    async with gate.turn("a", 1):
        waits = asyncio.ensure_future(gate.turn("b", 1).__aenter__())
        await settle()
        gate.close()
        with pytest.raises(RequestError) as caught:
            await waits
        assert caught.value.status == 503
    with pytest.raises(RequestError):
        await gate.turn("a", 1).__aenter__()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(1, 5)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
    ),
    max_size=40,
)


@examples(40)
@given(steps=steps)
def test_never_too_many_run_and_nobody_is_forgotten(steps):
    async def program():
        gate = AdmissionQueue(Limits(running=4, waiting=100))
        asked, running = {}, {}
        now = peak = 0

        async def ask(number, client, size):
            nonlocal now, peak
            async with gate.turn(client, size):
                now += min(size, 4)
                peak = max(peak, now)
                running[number] = asyncio.Event()
                try:
                    await running[number].wait()
                finally:
                    now -= min(size, 4)
                    del running[number]

        for number, (what, which, size) in enumerate(steps):
            if what == "ask":
                asked[number] = asyncio.ensure_future(ask(number, which, size))
            elif what == "end" and running:
                list(running.values())[which % len(running)].set()
            elif what == "cancel" and asked:
                asked.pop(list(asked)[which % len(asked)]).cancel()
            await settle()
            assert gate.running == now <= 4
            # What waits does so because there is no room for who is next.
            assert not gate.waiting or gate.running > 0
        while not all(task.done() for task in asked.values()):
            for event in list(running.values()):
                event.set()
            await settle()
        assert (gate.running, gate.waiting) == (0, 0)
        assert peak <= 4

    asyncio.run(program())


async def test_answers_that_wait_are_counted_by_model():
    gate = AdmissionQueue(Limits(running=2))
    async with gate.turn("a", 2, "one"):
        asked = [("a", 1, "one"), ("b", 2, "two"), ("b", 1, "one")]
        turns = [gate.turn(*one) for one in asked]
        waits = [asyncio.ensure_future(turn.__aenter__()) for turn in turns]
        await settle()
        assert gate.queued() == {"one": 2, "two": 2}
        waits[0].cancel()
        await settle()
        assert gate.queued() == {"one": 1, "two": 2}
    await settle()
    assert gate.queued() == {"one": 1}
    await turns[1].__aexit__(None, None, None)
    await settle()
    assert gate.queued() == {}
    await turns[2].__aexit__(None, None, None)
    assert gate.running == 0


async def test_a_turn_may_be_over_before_all_is_read_but_not_of_too_many():
    gate = AdmissionQueue(Limits(running=2))
    first, second = gate.turn("a", 2), gate.turn("b", 2)
    async with first:
        first.finished()
        first.finished()
        assert gate.running == 0
        async with second:
            second.finished()
            assert gate.running == 2
        assert gate.running == 0
    async with second:
        second.finished()
        assert gate.running == 0
    second.finished()
    assert gate.running == 0
