"""Conversations without a screen: what a session keeps of them, answers on one branch, the plain lines of --inline."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chatterm.backends.backend import EngineError, Exchange, FinishReason, TokenEvent, ToolResult
from chatterm.cli.inline.chat import Inline, LineInput, run_inline
from chatterm.cli.main import call
from chatterm.cli.oneshot import answer
from chatterm.commands.registry import plain_commands
from chatterm.conversation.headless import Talk
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from tests.chatterm.scripted import Script, ScriptedBackend


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore.open(tmp_path / "sessions.db")
    yield store
    store.close()


def saved(path: Path) -> tuple[SessionInfo, list[Exchange]]:
    """The latest session as another process finds it."""
    store = SessionStore.open(path)
    try:
        latest = store.latest()
        assert latest is not None
        info, tree, _ = store.load(latest.id)
        return info, tree.path(tree.head)
    finally:
        store.close()


def talk_of(backend: ScriptedBackend, store: SessionStore) -> Talk:
    backend.open()
    return Talk(backend, store)


def texts(path: Sequence[Exchange]) -> list[tuple[str, str]]:
    return [(exchange.user, exchange.text) for exchange in path]


# -- Talk


def test_every_turn_is_saved_with_what_the_engine_needs_to_go_on(store: SessionStore) -> None:
    talk = talk_of(ScriptedBackend([Script("first answer", reasoning="hm, hm"), Script("second")]), store)
    list(talk.ask("one"))
    list(talk.ask("two"))
    store.close()
    info, path = saved(store.path)
    assert (info.title, info.model) == ("one", "scripted")
    assert texts(path) == [("one", "first answer"), ("two", "second")]
    assert [exchange.parent for exchange in path] == [None, 1]
    assert path[0].reasoning == "hm, hm"
    assert len(path[0].token_ids) == 5
    assert path[0].shown == (2, 5)
    assert path[0].finish_reason == "eos"
    assert path[0].stats["generated_tokens"] == 5


def test_a_session_goes_on_and_the_backend_gets_its_path(store: SessionStore) -> None:
    list(talk_of(ScriptedBackend([Script("first")]), store).ask("one"))
    store.flush()
    latest = store.latest()
    assert latest is not None
    backend = ScriptedBackend([Script("second")])
    backend.open()
    talk = Talk(backend, store, latest.id)
    talk.begin()
    assert backend.history == [("one", "first")]
    list(talk.ask("two"))
    store.close()
    assert texts(saved(store.path)[1]) == [("one", "first"), ("two", "second")]


def test_a_running_answer_is_saved(store: SessionStore) -> None:
    talk = talk_of(ScriptedBackend([Script("word " * 100)]), store)
    events = talk.ask("go")
    for _ in range(20):
        next(events)
    store.flush()
    session = talk.saved.session
    assert session is not None
    _, tree, _ = store.load(session)
    kept = tree.path(tree.head)[0]
    events.close()
    store.flush()
    assert (kept.user, kept.text, len(kept.token_ids)) == ("go", ("word " * 100)[:80], 20)
    assert kept.finish_reason is None
    assert store.load(session)[1].path(1)[0].finish_reason == "cancelled"


def test_a_retry_is_a_branch_and_undo_goes_back(store: SessionStore) -> None:
    backend = ScriptedBackend([Script("one"), Script("a"), Script("b")])
    talk = talk_of(backend, store)
    list(talk.ask("first"))
    list(talk.ask("second"))
    list(talk.retry())
    assert texts(talk.path) == [("first", "one"), ("second", "b")]
    assert backend.history == texts(talk.path)
    assert [exchange.text for exchange in talk.tree.siblings(3)] == ["a", "b"]
    assert talk.undo() == "second"
    assert backend.history == [("first", "one")]
    assert len(talk.tree) == 3
    assert talk.redo() == "second"
    assert backend.history == [("first", "one"), ("second", "b")]
    with pytest.raises(EngineError, match=r"nothing to redo\."):
        talk.redo()


def test_a_message_is_undone_and_restored_with_what_tools_said_to_its_answer(store: SessionStore) -> None:
    backend = ScriptedBackend([Script("I look.")])
    talk = talk_of(backend, store)
    list(talk.ask("go"))
    talk.keep([ToolResult("look", "{}", "a tree")])
    before = texts(talk.path)
    assert len(before) == 2
    assert talk.undo() == "go"
    assert (talk.path, backend.history) == ([], [])
    assert talk.redo() == "go"
    assert texts(talk.path) == backend.history == before


@pytest.mark.parametrize("error", [EngineError("It does not fit."), KeyboardInterrupt()])
def test_what_is_refused_was_never_there(store: SessionStore, error: BaseException) -> None:
    backend = ScriptedBackend([Script("one"), Script(error=error), Script(error=error), Script("two")])
    talk = talk_of(backend, store)
    list(talk.ask("first"))
    for events in (talk.ask("too long"), talk.retry()):
        with pytest.raises(type(error)):
            list(events)
        assert texts(talk.path) == backend.history == [("first", "one")]
    list(talk.ask("second"))
    store.close()
    assert texts(saved(store.path)[1]) == [("first", "one"), ("second", "two")]


def test_an_error_in_mid_answer_keeps_what_was_said(store: SessionStore) -> None:
    talk = talk_of(ScriptedBackend([Script("abcdefgh", error=EngineError("Boom."), error_after=1)]), store)
    with pytest.raises(EngineError, match="Boom"):
        list(talk.ask("go"))
    store.close()
    path = saved(store.path)[1]
    assert texts(path) == [("go", "abcd")]
    assert path[0].finish_reason == "cancelled"


def test_continue_adds_to_the_exchange(store: SessionStore) -> None:
    backend = ScriptedBackend([Script("one", finish_reason=FinishReason.LENGTH), Script(" two")])
    talk = talk_of(backend, store)
    list(talk.ask("go"))
    assert [event.text for event in talk.resume()] == [" two"]
    assert texts(talk.path) == [("go", "one two")]
    assert talk.path[0].stats["generated_tokens"] == len(talk.path[0].token_ids) == 2
    with pytest.raises(EngineError, match="complete"):
        list(talk.resume())
    assert texts(talk.path) == [("go", "one two")]


# -- run -p with a session


def test_one_shot_prompts_go_on_with_a_session(store: SessionStore) -> None:
    talk = talk_of(ScriptedBackend([Script("first")]), store)
    list(talk.ask("one"))
    assert talk.saved.session is not None
    backend, out = ScriptedBackend([Script("second"), Script("third")]), io.StringIO()
    answer(backend, ["two", "three"], session=talk.saved.session, store=store, out=out, err=io.StringIO())
    assert out.getvalue() == "second\n\nthird\n"
    assert backend.calls[1] == ("load_path", (1,))
    assert texts(saved(store.path)[1]) == [("one", "first"), ("two", "second"), ("three", "third")]


def test_without_a_session_a_one_shot_keeps_nothing(store: SessionStore) -> None:
    answer(ScriptedBackend(), ["hi"], out=io.StringIO(), err=io.StringIO())
    assert store.latest() is None


def test_a_database_that_cannot_be_written_is_told_and_the_answer_comes(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    out, err = io.StringIO(), io.StringIO()
    store = SessionStore.open(folder / "sessions.db")
    assert run(["hi"], ScriptedBackend(), store=store, out=out, err=err) == 0
    assert "Hello there." in out.getvalue()
    assert "not saved" in err.getvalue()


# -- run --inline


def run(
    lines: Sequence[str],
    backend: ScriptedBackend,
    *,
    store: SessionStore,
    out: io.StringIO | None = None,
    err: io.StringIO | None = None,
    by_hand: bool = False,
    **options: object,
) -> int:
    stream = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    source = LineInput(stream, by_hand)
    out, err = out or io.StringIO(), err or io.StringIO()
    return run_inline(backend, store=store, lines=source, out=out, err=err, **options)  # type: ignore[arg-type]


def test_a_pipe_gets_the_answers_and_nothing_else(store: SessionStore) -> None:
    out, err = io.StringIO(), io.StringIO()
    backend = ScriptedBackend([Script("One.", reasoning="hm"), Script("Two.\n")])
    assert run(["first", "", "second \\", "and more"], backend, store=store, out=out, err=err) == 0
    assert out.getvalue() == "One.\n\nTwo.\n\n"
    assert err.getvalue() == ""
    assert backend.history == [("first", "One."), ("second \nand more", "Two.\n")]
    assert backend.closed
    assert texts(saved(store.path)[1]) == backend.history
    again = SessionStore.open(store.path)
    assert again.prompts() == ["first", "second \nand more"]
    again.close()


def test_the_last_line_may_lack_its_end_or_ask_for_another(store: SessionStore) -> None:
    backend = ScriptedBackend()
    assert (
        run_inline(
            backend, store=store, lines=LineInput(io.BytesIO(b"one\\\ntwo\\"), False), out=io.StringIO()
        )
        == 0
    )
    assert [question for question, _ in backend.history] == ["one\ntwo"]


def test_thinking_is_marked_by_words_and_dim_only_where_there_is_colour(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for name, (variable, value) in {
        "colour": ("LANG", "C"),
        "none": ("NO_COLOR", "1"),
        "dumb": ("TERM", "dumb"),
    }.items():
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            out = Terminal()
            backend = ScriptedBackend([Script("Yes.", reasoning="hm")])
            assert run(["go"], backend, store=SessionStore.open(tmp_path / name), out=out, by_hand=True) == 0
            shown[name] = out.getvalue()
    assert "(thinking)\n\x1b[2mhm\x1b[22m\n(answer)\nYes.\n\n" in shown["colour"]
    assert "(thinking)\nhm\n(answer)\nYes.\n\n" in shown["none"]
    assert shown["none"] == shown["dumb"]
    assert "\x1b" not in shown["none"]


def test_commands_of_the_registry_work_or_say_that_they_need_the_screen(store: SessionStore) -> None:
    out, err = io.StringIO(), io.StringIO()
    scripts = [Script("cut", finish_reason=FinishReason.LENGTH), Script(" whole"), Script("other")]
    backend = ScriptedBackend(scripts, thinks=True)
    lines = [
        "go",
        "/go",
        "/retry",
        "/undo",
        "/redo",
        "/undo",
        "/think off",
        "/system Be brief.",
        "/model other",
        "/rename My\x1b[2J talk",
    ]
    lines += [
        "/models",
        "/stats",
        "/help",
        "/copy",
        "/nope",
        "/think maybe",
        " /usr/bin is a path",
        "/bye",
        "never",
    ]
    assert run(lines, backend, store=store, out=out, err=err) == 1
    text, errors = out.getvalue(), err.getvalue()
    assert text.startswith("cut\n\n whole\n\nother\n\nUndone: go\nRestored: go\nUndone: go\n")
    assert "The model answers without thinking." in text
    assert "The new system prompt applies from the next message on." in text
    assert "* other" in text
    assert "  /retry: Answer again" in text
    assert "  /compact files|start|off: Make room: no files" in text
    assert "  /cache [why]: What of the KV cache each turn reused" in text
    assert "cut off at the token limit; /continue resumes it" in errors
    assert "/copy needs the chat screen" in errors
    assert "Unknown command /nope" in errors
    assert "not 'maybe'" in errors
    assert (backend.think, backend.system, backend.model) == ("off", "Be brief.", "other")
    assert [question for question, _ in backend.history] == [" /usr/bin is a path"]
    info, path = saved(store.path)
    assert (info.title, info.model, info.think, info.system) == ("My talk", "other", "off", "Be brief.")
    assert [exchange.user for exchange in path] == [" /usr/bin is a path"]


def test_what_the_model_writes_never_commands_the_terminal(store: SessionStore) -> None:
    out = Terminal()
    assert run(["go"], ScriptedBackend([Script("\x1b[2Jboo\x07")]), store=store, out=out, by_hand=True) == 0
    assert "\x1b" not in out.getvalue()
    assert "\u241b[2Jboo\u2407" in out.getvalue()


def test_a_line_that_is_no_text_is_not_sent(store: SessionStore) -> None:
    err, backend = io.StringIO(), ScriptedBackend()
    lines = LineInput(io.BytesIO(b"caf\xe9\nfine\n"), by_hand=False)
    assert run_inline(backend, store=store, lines=lines, out=io.StringIO(), err=err) == 1
    assert "not UTF-8" in err.getvalue()
    assert [question for question, _ in backend.history] == ["fine"]


def test_a_model_that_cannot_be_loaded_is_an_error_and_everything_is_closed(store: SessionStore) -> None:
    backend = ScriptedBackend(load_error=EngineError("No memory."))
    with pytest.raises(EngineError, match="No memory"):
        run(["go"], backend, store=store)
    assert backend.closed


class Interrupting(ScriptedBackend):
    """Ctrl-C comes in the middle of the first answer."""

    def send(self, text: str) -> Iterator[TokenEvent]:
        def events() -> Iterator[TokenEvent]:
            for number, event in enumerate(super(Interrupting, self).send(text)):
                if number == 2 and text == "go":
                    self.stop()
                    raise KeyboardInterrupt
                yield event

        return events()


def test_ctrl_c_stops_the_answer_of_a_person_and_ends_a_pipe(tmp_path: Path) -> None:
    for by_hand in (True, False):
        store = SessionStore.open(tmp_path / f"{by_hand}.db")
        out, err, backend = Terminal(), io.StringIO(), Interrupting([Script("word word word")])
        if by_hand:
            assert run(["go", "on"], backend, store=store, out=out, err=err, by_hand=True) == 0
            assert "[stopped; /continue resumes it]" in err.getvalue()
        else:
            with pytest.raises(KeyboardInterrupt):
                run(["go", "on"], backend, store=store, out=out, err=err)
        path = saved(store.path)[1]
        assert (path[0].user, path[0].text, path[0].finish_reason) == ("go", "word word wo", "cancelled")
        assert len(path) == (2 if by_hand else 1)


def test_ctrl_c_at_the_prompt_forgets_the_lines_so_far(store: SessionStore) -> None:
    class Typed(LineInput):
        def next(self, prompt: str) -> str | None:
            line = super().next(prompt)
            if line == "^C":
                raise KeyboardInterrupt
            return line

    backend, out = ScriptedBackend(), Terminal()
    backend.open()
    lines = Typed(io.BytesIO(b"not this \\\n^C\nbut this\n"), by_hand=True)
    talk = Talk(backend, store)
    assert Inline(backend, talk, lines=lines, out=out, err=io.StringIO()).run() == 0
    assert [question for question, _ in backend.history] == ["but this"]


def test_going_on_by_hand_says_where_it_was(store: SessionStore) -> None:
    list(talk_of(ScriptedBackend(), store).ask("the first words"))
    store.flush()
    latest = store.latest()
    assert latest is not None
    out = Terminal()
    assert run([], ScriptedBackend(), store=store, out=out, by_hand=True, session=latest.id) == 0
    assert "scripted on cpu, context 4,096 tokens" in out.getvalue()
    assert "Your last message: the first words" in out.getvalue()


def test_every_command_that_is_promised_is_there(store: SessionStore) -> None:
    for command in plain_commands():
        argument = "x" if command.arguments and not command.arguments.startswith("[") else ""
        line, err = f"/{command.name} {argument}".strip(), io.StringIO()
        run([line], ScriptedBackend(), store=SessionStore.open(store.path), err=err)
        assert "needs" not in err.getvalue()


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    backend = ScriptedBackend([Script("first"), Script("second"), Script("third")])
    monkeypatch.setattr("chatterm.backends.local.LocalBackend", lambda model, options: backend)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\n")))
    assert call(["run", "scripted", "--inline", "-p", "one", "--top-k", "3"]) == 0
    assert capsys.readouterr().out == "first\n\nsecond\n\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"three")))
    assert call(["run", "--continue"]) == 0
    assert capsys.readouterr().out == "third\n"
    assert ("load_path", (1, 2)) in backend.calls
    store = SessionStore.open()
    latest = store.latest()
    assert latest is not None
    assert (latest.exchanges, latest.sampling) == (3, {"top_k": 3})
    store.close()
    assert call(["run", "--inline", "--json"]) == 2
    assert "leave out --json" in capsys.readouterr().err


def test_the_library_is_there_without_a_screen(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper.md").write_text("They are shared.")
    backend, out, err = (
        ScriptedBackend([Script("One.")] * 3, counts={"paper": 7}),
        io.StringIO(),
        io.StringIO(),
    )
    lines = [
        "/library",
        "/library add paper.md",
        "/library add paper.md",
        "/library open papr",
        "hello",
        "/library open paper",
        "about it",
        "/library",
        "/reset",
        "/library remove paper",
    ]
    run(lines, backend, store=store, out=out, err=err, by_hand=True)
    said = out.getvalue()
    assert "The library is empty." in said
    assert "paper is in the library: 7 tokens." in said
    assert "A new conversation with paper begins." in said
    assert "▸ paper" in said
    assert "paper is removed" in said
    assert "with the same text" in err.getvalue()
    assert "did you mean paper" in err.getvalue()
    assert backend.documents == ()
    again = SessionStore.open(store.path)
    begun = {info.title: again.load(info.id)[0].documents for info in again.find()}
    assert [document.name for document in begun["about it"]] == ["paper"]
    assert begun["hello"] == ()
    again.close()
