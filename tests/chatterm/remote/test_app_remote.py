"""The chat screen with models of servers: the picker, switching, comparing, and what goes wrong."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions, EngineError, ModelChoice, Progress
from chatterm.backends.remote.address import Remote
from chatterm.backends.remote.server_scan import choices_beside, local_choices, named_choices
from chatterm.backends.router import BackendRouter
from chatterm.screens.candidates import CandidatesScreen
from chatterm.screens.models import ModelPicker
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.remote.rough_server import (
    RoughServer,
    delta,
    document,
    events,
    gated,
    rough,
    said,
    status,
    stream,
)
from tests.chatterm.remote.test_pictures import png
from tests.chatterm.scripted import Script, ScriptedBackend

TAGS = {"models": [{"name": "qwen3:latest"}, {"name": "gemma3:1b"}]}


class Here(ScriptedBackend):
    """What `BackendRouter` asks for models of this machine."""

    @property
    def options(self) -> ChatOptions:
        return ChatOptions(system=self.system, think=self.think, sampling=dict(self.sampling))


def anywhere(
    model: str,
    here: Here | None = None,
    remotes: dict[str, Remote] | None = None,
    others: dict[str, Here] | None = None,
) -> Any:
    def make(name: str, options: ChatOptions) -> Any:
        made = (others or {}).get(name) or here or Here()
        made.model = name
        return made

    made = BackendRouter(model, ChatOptions(), remotes or {}, make)
    made.load_gate = None
    return made


def address(server: RoughServer) -> str:
    return f"openai://{server.place}/tiny"


async def test_a_chat_with_a_server_shows_what_it_tells() -> None:
    with rough(said("One", " river", prompt=40, cached=32)) as server:
        async with driven(anywhere(address(server)), (120, 30)) as driver:
            await driver.send("Name a river.")
            assert driver.answers == ["One river"]
            await driver.shows("32")
            await driver.send("/cache")
            await driver.send("/cache why")
            assert all("KV cache is on" in error for error in driver.errors)
            assert len(driver.errors) == 2
            await driver.send("/stats")
            await driver.shows("cache hit rate")
            assert "80%" in driver.text()


async def test_switching_to_a_server_and_back_keeps_the_history(tmp_path: Any) -> None:
    store = SessionStore.open(tmp_path / "sessions.db")
    here = Here([Script("From here."), Script("Here again.")])
    with rough(said("From there.")) as server:
        async with driven(anywhere("scripted", here), store=store) as driver:
            await driver.send("One")
            await driver.send(f"/model {address(server)}")
            await driver.send("Two")
            await driver.send("/model scripted")
            await driver.send("Three")
            assert driver.answers == ["From here.", "From there.", "Here again."]
            contents = [message["content"] for message in server.requests[0].json["messages"]]
            assert contents == ["One", "From here.", "Two"]
            assert [question for question, _ in here.history] == ["One", "Two", "Three"]
            assert driver.text().count("its cache is rebuilt") == 1, "that of a server is its own"
            models = [exchange.model for exchange in driver.app.chat.conversation.path]
            assert models == ["scripted", address(server), "scripted"]
            await driver.shows("tiny · 1 token")
            session = driver.app.chat.conversation.saved.session
    store.flush()
    assert session is not None
    _, tree, _ = store.load(session)
    assert [exchange.model for exchange in tree.path(tree.head)] == models
    assert all(exchange.token_ids == [] for exchange in tree.path(tree.head) if "://" in exchange.model)
    store.close()


async def test_a_server_that_cannot_be_reached_leaves_the_model_that_is_there() -> None:
    here = Here([Script("Still here.")])
    async with driven(anywhere("scripted", here)) as driver:
        await driver.send("/model openai://127.0.0.1:9/m")
        assert (
            "127.0.0.1:9 cannot be reached (Connection refused); is its server running?" in driver.errors[0]
        )
        await driver.send("Hi")
        assert driver.answers == ["Still here."]


async def test_what_came_before_a_server_died_stays_and_goes_on() -> None:
    died = stream(*events(delta("One, "), done=False), ends=False)
    with rough(died, said("two.")) as server:
        async with driven(anywhere(address(server))) as driver:
            await driver.send("Count.")
            assert driver.answers == ["One, "]
            assert "closed the connection" in driver.errors[0]
            await driver.send("/continue")
            assert driver.answers == ["One, two."]
            assert server.requests[1].json["messages"][-1]["content"] == "One, "


async def test_continue_is_offered_only_where_the_server_can() -> None:
    for owner, way_on in (("vllm", True), ("somebody", False)):
        died = stream(*events(delta("One, "), done=False), ends=False)
        listing = {"data": [{"id": "tiny", "owned_by": owner}]}
        with rough(died, said("More."), models=listing) as server:
            async with driven(anywhere(address(server))) as driver:
                await driver.send("Count.")
                await driver.shows("stopped")
                assert ("/continue resumes it" in driver.text()) is way_on
                assert "cached" not in driver.text(), "nobody told what was"
                await driver.send("On.")
                assert "/continue resumes it" not in driver.text(), "it goes on with the last answer only"


async def test_thinking_that_cannot_be_ended_offers_no_end() -> None:
    gate = threading.Event()
    thinks = gated(gate, events(delta(reasoning="hm"), done=False), events(delta("42"), delta(finish="stop")))
    with rough(thinks) as server:
        async with driven(anywhere(address(server))) as driver:
            await driver.send("Well?", wait=False)
            await driver.shows("thinking ·")
            assert "answers now" not in driver.text()
            gate.set()
            await driver.idle()


async def test_the_address_of_a_server_is_shown_once() -> None:
    with rough(said("Yes.")) as server:
        async with driven(anywhere(address(server)), (140, 40)) as driver:
            await driver.shows(f"tiny · {server.place}")
            await driver.send("Hi")
            await driver.shows("runs on")
            panel = driver.text().split("runs on")[0]
            assert server.place not in panel


async def test_a_refused_message_is_given_back() -> None:
    with rough(status(400, "too long")) as server:
        async with driven(anywhere(address(server))) as driver:
            await driver.send("My message")
            assert "too long" in driver.errors[0]
            assert driver.composer.text == "My message"
            assert driver.answers == []


async def test_waiting_for_a_busy_server_is_shown_and_can_be_stopped() -> None:
    with rough(status(429, Retry_After="300")) as server:
        async with driven(anywhere(address(server))) as driver:
            await driver.send("Hi", wait=False)
            await driver.shows("the server is limiting requests; trying again in")
            await driver.pilot.press("escape")
            await driver.idle()


async def test_comparing_two_models_and_keeping_the_other_ones_answer() -> None:
    gate = threading.Event()
    here = Here([Script("First."), Script("From here.", gate=gate)])
    with rough(
        gated(gate, events(delta("From"), done=False), events(delta(" there."), delta(finish="stop")))
    ) as server:
        async with driven(anywhere("scripted", here), (100, 30)) as driver:
            await driver.send("Hi")
            await driver.send(f"/compare {address(server)}", wait=False)
            await driver.shows("2  tiny")
            assert isinstance(driver.app.screen, CandidatesScreen)
            await driver.shows("1  scripted")
            gate.set()
            await driver.shows("From here.")
            await driver.shows("From there.")
            await driver.until(lambda: driver.app.chat.conversation.turn is None)
            await driver.pilot.press("2")
            await driver.idle()
            assert driver.answers == ["From there."]
            assert driver.app.chat.conversation.path[-1].model == address(server)
            await driver.shows("< 3/3 > tiny")
            assert driver.app.chat.model_name == "scripted"
            await driver.send("More")
            assert here.history[0] == ("Hi", "From there.")


async def test_several_answers_about_a_picture_stand_below_the_words_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png(4, 4))
    monkeypatch.chdir(tmp_path)
    with rough(said("Blue.")) as server:
        async with driven(anywhere(address(server)), (100, 30)) as driver:
            await driver.send("What is on @a.png?")
            await driver.until(lambda: driver.answers == ["Blue."])
            await driver.idle()
            await driver.send("/retry 2", wait=False)
            await driver.shows("2 answers  What is on a.png?")
            assert "sha256" not in driver.text()
            await driver.until(lambda: driver.app.chat.conversation.turn is None)
            await driver.pilot.press("1")
            await driver.idle()


async def test_comparing_with_what_is_not_there_keeps_the_one_answer() -> None:
    here = Here([Script("First."), Script("Second.")])
    async with driven(anywhere("scripted", here), (100, 30)) as driver:
        await driver.send("/compare other")
        await driver.send("Hi")
        await driver.send("/compare scripted")
        assert "no message to compare" in driver.errors[0]
        assert "the current model" in driver.errors[1]
        await driver.send("/compare openai://127.0.0.1:9/m", wait=False)
        await driver.shows("Answer 2 failed")
        await driver.pilot.press("1")
        await driver.idle()
        assert driver.answers == ["Second."]


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_comparison_shows_how_far_the_other_model_is_and_can_be_stopped_meanwhile(
    is_stopped: bool,
) -> None:
    gate = threading.Event()
    here, other = Here([Script("First."), Script("From here.")]), Here([Script("From the other.")])
    other.load_progress = (Progress("load", "weights\x1b[31m", 61, 98),)
    other.load_gate = gate
    async with driven(anywhere("scripted", here, others={"other": other}), (100, 30)) as driver:
        await driver.send("Hi")
        await driver.send("/compare other", wait=False)
        await driver.shows("loading weights")
        await driver.shows("62%")
        if is_stopped:
            await driver.pilot.press("escape")
            await driver.shows("stopped before its model was loaded")
        gate.set()
        await driver.until(lambda: driver.app.chat.conversation.turn is None)
        if not is_stopped:
            await driver.shows("From the other.")
        await driver.pilot.press("1")
        await driver.idle()
        assert driver.answers == ["From here."]


async def test_a_comparison_shows_how_far_each_prompt_is_read() -> None:
    gate = threading.Event()
    here = Here([Script("First."), Script("From here.", gate=gate)])
    other = Here([Script("From the other.", gate=gate)])
    async with driven(anywhere("scripted", here, others={"other": other}), (80, 24)) as driver:
        await driver.send("Hi")
        here.prefill, other.prefill = (500, 2_000), (1_250, 2_000)
        await driver.send("/compare other", wait=False)
        await driver.until(
            lambda: re.search(r"1  scripted  \S reading · 25% +│ 2  other  \S reading · 62%", driver.text())
        )
        other.prefill = (0, 0)
        await driver.until(
            lambda: re.search(r"1  scripted  \S reading · 25% +│ 2  other  \S reading\n", driver.text())
        )
        gate.set()
        await driver.until(lambda: driver.app.chat.conversation.turn is None)
        await driver.pilot.press("1")
        await driver.idle()


async def test_stopping_a_comparison_stops_both() -> None:
    gate = threading.Event()
    here = Here([Script("First."), Script("From here.", gate=gate)])
    with rough(gated(gate, events(delta("From"), done=False))) as server:
        async with driven(anywhere("scripted", here), (100, 30)) as driver:
            await driver.send("Hi")
            await driver.send(f"/compare {address(server)}", wait=False)
            await driver.shows("From")
            await driver.pilot.press("escape")
            await driver.until(lambda: driver.app.chat.conversation.turn is None)
            await driver.pilot.press("escape")
            await driver.idle()
            assert driver.answers == ["First."]
            gate.set()


# --- the picker ---


async def picked(driver: Driver, *looks: Callable[[], list[ModelChoice]]) -> ModelPicker:
    driver.app.chat.looks = looks
    await driver.send("/model", wait=False)
    await driver.until(lambda: isinstance(driver.app.screen, ModelPicker))
    assert isinstance(driver.app.screen, ModelPicker)
    return driver.app.screen


async def test_the_picker_does_not_wait_for_servers_and_lists_them_with_the_rest() -> None:
    gate = threading.Event()
    far = ModelChoice("work/big", None, False, None, server="work", label="big")

    def slow() -> list[ModelChoice]:
        gate.wait(30)
        return [far]

    with rough(models=TAGS) as server:
        usual = {server.port: ("Ollama", "ollama")}
        async with driven(anywhere("scripted")) as driver:
            await picked(driver, lambda: local_choices(usual), slow)
            await driver.shows("gemma3:1b")
            assert f"Ollama localhost:{server.port}" in driver.text()
            assert "looking for servers" in driver.text()
            assert "scripted" in driver.text()
            gate.set()
            await driver.shows("big")
            await driver.until(lambda: "looking for servers" not in driver.text())
            await driver.types("qwen3")
            await driver.until(lambda: "gemma3:1b" not in driver.text())
            await driver.shows(f"ollama://localhost:{server.port}/qwen3")
            await driver.pilot.press("enter")
            await driver.idle()
            assert driver.app.chat.model_name == f"ollama://localhost:{server.port}/qwen3"


async def test_servers_found_after_the_picker_was_left_break_nothing() -> None:
    async with driven(anywhere("scripted")) as driver:
        picker = await picked(driver)
        await driver.pilot.press("escape")
        await driver.until(lambda: not picker.children)
        picker.add([ModelChoice("work/big", None, False, None)])
        picker.show([ModelChoice("work/small", None, True, None)])
        await driver.pilot.pause()


async def test_the_picker_lists_the_server_one_talks_to_and_no_columns_of_nothing() -> None:
    listing = {"data": [{"id": "tiny", "owned_by": "x"}, {"id": "other", "owned_by": "x"}]}
    with rough(models=listing) as server:
        async with driven(anywhere(address(server)), (100, 30)) as driver:
            driver.app.chat.backend._now.catalogue = lambda: [ModelChoice("one", None, False, None)]
            await picked(driver)
            await driver.until(lambda: re.search(rf"● tiny +{server.place}", driver.text()))
            await driver.until(lambda: re.search(rf"○ other +{server.place}", driver.text()))
            assert "to download" in driver.text()
            assert not re.search(r"size|memory|speed|\?", driver.text())
    assert choices_beside(address(server))[0].label == "tiny", "it is gone by now"


def test_what_listens_and_is_no_such_server_is_passed_over() -> None:
    with rough(models=document({"hello": 1})) as odd, rough(models=status(401)) as closed, rough() as good:
        usual = {server.port: ("X", "openai") for server in (odd, closed, good)} | {9: ("none", "openai")}
        [choice] = local_choices(usual)
        assert (choice.label, choice.server, choice.context) == ("tiny", f"vLLM localhost:{good.port}", 4096)
        assert "authorization" not in good.listings[0].headers


def test_named_servers_are_listed_also_while_they_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k-1")
    with rough() as server:
        remotes = {
            "near": Remote(f"http://{server.place}", key_env="KEY"),
            "away": Remote("http://127.0.0.1:9", model="big"),
            "asks": Remote(f"http://{server.place}", key_command="false"),
        }
        found = [(choice.name, choice.label, choice.server) for choice in named_choices(remotes)]
        assert found == [("near/tiny", "tiny", "near"), ("away", "big", "away"), ("asks", "asks", "asks")]
        assert [request.headers["authorization"] for request in server.listings] == ["Bearer k-1"]


# --- without a screen ---


def test_what_is_not_said_is_done_by_the_backend_of_now() -> None:
    with rough(said("x")) as server:
        backend = anywhere("scripted", remotes={"work": Remote(f"http://{server.place}")})
        backend.open()
        assert backend.models() == ["scripted", "other", "work"]
        backend.switch("work")
        assert backend.model == "work/tiny"
        with pytest.raises(EngineError, match="not the address"):
            backend.switch("https://nowhere")
        assert backend.model == "work/tiny"
        assert backend.count("draft") is None
        backend.close()
