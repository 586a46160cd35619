"""`chatterm acp` as an editor meets it: the SDK's own client."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any
from unittest.mock import MagicMock

import pytest
from acp import (
    PROTOCOL_VERSION,
    RequestError,
    connect_to_agent,
    run_agent,
    schema,
    spawn_agent_process,
    text_block,
)
from hypothesis import given
from hypothesis import strategies as st

from chatterm.acp import agent as agents
from chatterm.acp.content import to_message
from chatterm.acp.engine import EditorEngine
from chatterm.acp.jsonrpc import LineTransport, parse_line
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.tools.rules import read_rules, rules_path
from chatterm.tools.session import ToolSession
from tests.chatterm.acp.scripted_agent import scripted
from tests.chatterm.scripted import ScriptedBackend
from tests.counting import PATIENCE, patience, until_true
from tests.fresh import examples

ROOT = Path(__file__).parents[3]


@dataclass
class Editor:
    """A client that notes what it is shown, and answers as it is told."""

    answers: list[str] = field(default_factory=list)
    """To questions, in their order: ids of options, or "cancelled". Later ones are `no`."""
    shown: list[Any] = field(default_factory=list)
    asked: list[tuple[schema.ToolCallUpdate, list[schema.PermissionOption]]] = field(default_factory=list)
    silent: bool = False

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.shown.append(update)

    async def request_permission(
        self, session_id: str, tool_call: Any, options: Any, **_: Any
    ) -> schema.RequestPermissionResponse:
        self.asked.append((tool_call, options))
        if self.silent:
            await asyncio.Event().wait()
        answer = self.answers.pop(0) if self.answers else "no"
        if answer == "cancelled":
            return schema.RequestPermissionResponse(outcome=schema.DeniedOutcome(outcome="cancelled"))
        return schema.RequestPermissionResponse(
            outcome=schema.AllowedOutcome(outcome="selected", option_id=answer)
        )

    def on_connect(self, conn: Any) -> None: ...

    def text(self, kind: str) -> str:
        return "".join(u.content.text for u in self.shown if u.session_update == kind)

    def last_of(self, kind: str) -> Any:
        return [u for u in self.shown if u.session_update == kind][-1]


def process(scripts: list[dict[str, Any]]) -> list[str]:
    return [sys.executable, "-m", "tests.chatterm.acp.scripted_agent", json.dumps(scripts)]


@asynccontextmanager
async def agent(editor: Editor, scripts: list[dict[str, Any]], tools: str = "") -> AsyncIterator[Any]:
    """An agent in this process, over a socket: starting one takes longer than all that it does here."""
    ours, its = socket.socketpair()
    store = SessionStore.open()
    served = agents.Agent(EditorEngine(scripted(scripts), {}, {}), store, tools, "0")
    with its:
        lines: Any = LineTransport(its.fileno(), its.fileno())
        running = asyncio.create_task(run_agent(served, lines, use_unstable_protocol=True))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = connect_to_agent(editor, writer, reader, use_unstable_protocol=True)
        try:
            await client.initialize(protocol_version=PROTOCOL_VERSION)
            yield client
        finally:
            await client.close()
            writer.close()
            await running
            await asyncio.to_thread(served.end)
            assert store.close()


async def test_an_answer_with_thinking_is_streamed_and_saved_as_any_other(tmp_path: Path) -> None:
    editor = Editor()
    command = process([{"text": "It is **four**.", "reasoning": "two and two"}])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with spawn_agent_process(editor, *command, env=env, cwd=ROOT, use_unstable_protocol=True) as (
        conn,
        _,
    ):
        await conn.initialize(protocol_version=PROTOCOL_VERSION)
        made = await conn.new_session(cwd=str(tmp_path), mcp_servers=[])
        done = await conn.prompt(session_id=made.session_id, prompt=[text_block("2 + 2?")])
        assert done.stop_reason == "end_turn"
        assert done.usage.output_tokens > 0
        assert editor.text("agent_message_chunk") == "It is **four**."
        assert editor.text("agent_thought_chunk") == "two and two"
        assert editor.last_of("session_info_update").title == "2 + 2?"
        assert editor.last_of("usage_update").size == 4096
        listed = await conn.list_sessions()
        assert [one.session_id for one in listed.sessions] == [made.session_id]
    store = SessionStore.open()
    info, tree, _ = store.load(made.session_id)
    store.close()
    assert info.title == "2 + 2?"
    assert [(e.user, e.text, e.reasoning, e.finish_reason) for e in tree.path(tree.head)] == [
        ("2 + 2?", "It is **four**.", "two and two", "eos")
    ]


async def test_two_conversations_share_the_engine_and_a_saved_one_is_told_again(tmp_path: Path) -> None:
    first, second = Editor(), Editor()
    async with agent(first, [{"text": "one"}, {"text": "two"}, {"text": "three"}]) as conn:
        a = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        b = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        for session, text in ((a, "first"), (b, "second"), (a, "third")):
            await conn.prompt(session_id=session, prompt=[text_block(text)])
    async with agent(second, [{"text": "four"}]) as conn:
        await conn.load_session(cwd=str(tmp_path), session_id=a, mcp_servers=[])
        assert second.text("user_message_chunk") == "firstthird"
        assert second.text("agent_message_chunk") == "onethree"
        await conn.prompt(session_id=a, prompt=[text_block("fourth")])
        with pytest.raises(RequestError, match="session"):
            await conn.load_session(cwd=str(tmp_path), session_id="nowhere", mcp_servers=[])
    store = SessionStore.open()
    said = {id: [(e.user, e.text) for e in store.load(id)[1].exchanges] for id in (a, b)}
    store.close()
    assert said == {a: [("first", "one"), ("third", "three"), ("fourth", "four")], b: [("second", "two")]}


async def test_a_prompt_is_cancelled_in_the_middle_and_the_text_stays(tmp_path: Path) -> None:
    editor = Editor()
    scripts = [{"text": "A long answer that never ends.", "waits": True, "gate_after": 2}, {"text": "Next."}]
    async with agent(editor, scripts) as conn:
        session = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        asked = asyncio.create_task(conn.prompt(session_id=session, prompt=[text_block("Tell me.")]))
        await until_true(lambda: editor.text("agent_message_chunk"))
        with pytest.raises(RequestError, match="An answer is running in this session"):
            await conn.prompt(session_id=session, prompt=[text_block("And now?")])
        await conn.cancel(session_id=session)
        assert (await asked).stop_reason == "cancelled"
        assert (
            await conn.prompt(session_id=session, prompt=[text_block("Go on.")])
        ).stop_reason == "end_turn"
    store = SessionStore.open()
    texts = [(e.text, e.finish_reason) for e in store.load(session)[1].exchanges]
    store.close()
    assert texts == [("A long a", "cancelled"), ("Next.", "eos")]


WRITES = {"text": "I write.", "calls": [["write_file", {"path": "a.txt", "text": "hello ``` <!-- x\n"}]]}


@pytest.mark.parametrize(
    ("answer", "written", "states"),
    [
        ("no", False, ["refused"]),
        ("yes please", False, ["refused"]),
        ("cancelled", False, ["refused"]),
        ("once", True, ["done"]),
        ("always", True, ["done"]),
    ],
)
async def test_a_call_runs_once_the_person_has_seen_it_and_said_yes(
    tmp_path: Path, answer: str, written: bool, states: list[str]
) -> None:
    editor = Editor([answer])
    async with agent(editor, [WRITES, {"text": "Done."}], "write") as conn:
        made = await conn.new_session(cwd=str(tmp_path), mcp_servers=[])
        assert made.modes.current_mode_id == "given"
        done = await conn.prompt(session_id=made.session_id, prompt=[text_block("Write it.")])
    assert done.stop_reason == ("cancelled" if answer == "cancelled" else "end_turn")
    assert (tmp_path / "a.txt").exists() is written
    [(call, options)] = editor.asked
    assert (call.kind, call.title) == ("edit", "write_file `a.txt`")
    assert {o.kind for o in options} == {"allow_once", "allow_always", "reject_once"}
    shown = call.content[-1].content.text
    assert "hello ``` <!-- x" in shown
    assert shown.startswith("````diff\n")
    assert shown.endswith("\n````")  # what is in it cannot end it
    assert editor.last_of("tool_call_update").status == ("completed" if written else "failed")
    assert bool(read_rules(rules_path())) is (answer == "always")
    store = SessionStore.open()
    exchanges = store.load(made.session_id)[1].exchanges
    store.close()
    assert [result.state for e in exchanges for result in e.results] == states


async def test_what_was_allowed_for_the_session_is_not_asked_again_and_no_mode_has_other_tools(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("inside")
    reads = {"text": "", "calls": [["read_file", {"path": "a.txt"}]]}
    editor = Editor(["session"])
    async with agent(editor, [reads, reads, WRITES, {"text": "Done."}]) as conn:
        session = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        await conn.set_session_mode(session_id=session, mode_id="read")
        with pytest.raises(RequestError, match="no such mode"):
            await conn.set_session_mode(session_id=session, mode_id="root")
        await conn.prompt(session_id=session, prompt=[text_block("Read.")])
    assert len(editor.asked) == 1
    ends = [u.status for u in editor.shown if u.session_update == "tool_call_update"]
    assert ends.count("completed") == 2
    assert (
        not (tmp_path / "a.txt").read_text().startswith("hello")
    )  # writing was off, and so was never asked for
    failed = [u for u in editor.shown if u.session_update == "tool_call" and u.status == "failed"]
    assert len(failed) == 1


async def test_a_question_that_nobody_answers_ends_with_the_prompt(tmp_path: Path) -> None:
    editor = Editor(silent=True)
    async with agent(editor, [WRITES], "write") as conn:
        session = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        asked = asyncio.create_task(conn.prompt(session_id=session, prompt=[text_block("Write.")]))
        await until_true(lambda: editor.asked)
        await conn.cancel(session_id=session)
        assert (await asked).stop_reason == "cancelled"
    assert not (tmp_path / "a.txt").exists()


async def test_a_session_too_many_closes_an_idle_one_away_from_the_loop_or_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = [], []
    open_tools = ToolSession.open

    def opens(*arguments: Any) -> ToolSession:
        opened.append(tools := open_tools(*arguments))
        return tools

    monkeypatch.setattr(agents, "MOST_OPEN", 1)
    monkeypatch.setattr(agents.ToolSession, "open", opens)
    monkeypatch.setattr(
        agents.ToolSession, "close", lambda tools: closed.append((tools, threading.get_ident()))
    )
    engine: Any = MagicMock(backend=ScriptedBackend(), fresh=SessionInfo(model="m"))
    agent = agents.Agent(engine, None, "", "1")
    await agent.new_session(str(tmp_path))
    second = (await agent.new_session(str(tmp_path))).session_id
    assert [tools for tools, _ in closed] == opened[:1]
    assert closed[0][1] != threading.get_ident()
    agent._dialogues[second].is_running = True
    with pytest.raises(RequestError, match="close some of them"):
        await agent.new_session(str(tmp_path))
    assert len(opened) == 2


def test_a_link_that_is_no_address_stays_text(tmp_path: Path) -> None:
    link = schema.ResourceContentBlock(type="resource_link", name="odd", uri="http://[x")
    assert to_message([text_block("See "), link], tmp_path) == "See http://[x"


async def test_files_are_attached_and_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk")
    link = schema.ResourceContentBlock(
        type="resource_link", name="notes", uri=(tmp_path / "notes.txt").as_uri()
    )
    held = schema.EmbeddedResourceContentBlock(
        type="resource", resource=schema.TextResourceContents(uri="file:///x/y.py", text="print(1)")
    )
    picture = schema.ImageContentBlock(type="image", data="AAAA", mime_type="image/png")
    editor = Editor()
    async with agent(
        editor, [{"text": "Yes."}, {"error": "The context is full; /compact makes room."}]
    ) as conn:
        session = (await conn.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        await conn.prompt(session_id=session, prompt=[text_block("See "), link, text_block(" and "), held])
        with pytest.raises(RequestError, match="text and files"):
            await conn.prompt(session_id=session, prompt=[picture])
        with pytest.raises(RequestError, match="context is full"):
            await conn.prompt(session_id=session, prompt=[text_block("More.")])
        with pytest.raises(RequestError, match="full path of a folder"):
            await conn.new_session(cwd="somewhere", mcp_servers=[])
    store = SessionStore.open()
    [exchange] = store.load(session)[1].exchanges
    store.close()
    assert exchange.user.startswith(f"See {tmp_path}/notes.txt and /x/y.py\n\n{tmp_path}/notes.txt:\n```")
    assert "remember the milk" in exchange.user
    assert exchange.user.endswith("/x/y.py:\n```\nprint(1)\n```")


METHODS = ["initialize", "authenticate", "session/new", "session/load", "session/prompt", "session/cancel"]
METHODS += ["session/list", "session/set_mode", "session/close", "session/resume", "session/fork", "_own", ""]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3),
    max_leaves=8,
)
NAMES = [
    "sessionId",
    "cwd",
    "mcpServers",
    "prompt",
    "protocolVersion",
    "cursor",
    "modeId",
    "_meta",
    "methodId",
]
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "method": st.sampled_from(METHODS) | VALUES,
        "params": st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5) | VALUES,
        "result": VALUES,
        "error": VALUES,
    },
)
LINES = st.one_of(
    st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")),
    VALUES.map(lambda v: json.dumps(v).encode()),
    MESSAGES.map(lambda m: json.dumps(m).encode()),
    st.sampled_from([b"[" * 200_000, b'{"id":1,"method":"session/list","params":' + b'{"a":' * 5_000]),
)


@given(LINES)
def test_what_goes_on_to_the_connection_is_a_message_that_it_can_stand(line: bytes) -> None:
    message, problem = parse_line(line)
    assert message is None or problem is None
    if message is not None:
        assert {message.get("id"): 0}  # it can be looked up
        assert isinstance(message.get("method", ""), str)
        assert "method" not in message or "_meta" not in (message.get("params") or {})
        assert "method" in message or isinstance(message.get("error", {}), dict)
        json.dumps(message.get("id"), allow_nan=False)
    if problem is not None:
        assert "\n" not in problem["error"]["message"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[bytes]"]:
    """An agent in a process of its own, which has to end as it should."""
    pipe, env = subprocess.PIPE, os.environ | {"CHATTERM_DATA": str(tmp_path_factory.mktemp("data"))}
    with subprocess.Popen(process([]), cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as started:
        yield started
        rest, errors = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0, errors
    assert b"Traceback" not in rest + errors


@examples(2)
@given(st.lists(LINES, min_size=40, max_size=60))
def test_hostile_lines_never_end_it_and_give_no_traceback(
    alone: "subprocess.Popen[bytes]", lines: list[bytes]
) -> None:
    last = {"jsonrpc": "2.0", "id": token_hex(8), "method": "initialize", "params": {"protocolVersion": 1}}
    assert alone.stdin is not None
    assert alone.stdout is not None
    with patience():
        alone.stdin.write(b"\n".join([*lines, json.dumps(last).encode()]) + b"\n")
        alone.stdin.flush()
        answers = [json.loads(alone.stdout.readline())]
        while answers[-1].get("id") != last["id"]:
            answers.append(json.loads(alone.stdout.readline()))
    assert answers[-1]["result"]["protocolVersion"] == 1
    for answer in answers:
        assert "Traceback" not in json.dumps(answer)
        assert answer["jsonrpc"] == "2.0"
