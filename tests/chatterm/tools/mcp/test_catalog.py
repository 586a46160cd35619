"""Prompts and resources of MCP servers: as commands, as attachments, and from servers that say anything."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace as Said
from typing import Any

import pytest
from hypothesis import given as of
from hypothesis import strategies as st

from chatterm.backends.backend import EngineError
from chatterm.cli.main import call
from chatterm.commands.completing import choice_completions, completions
from chatterm.commands.registry import find
from chatterm.commands.reports import help_lines
from chatterm.markdown.lines import line_text
from chatterm.tools.mcp import requests
from chatterm.tools.mcp.catalog import (
    MOST,
    Offers,
    PromptArgument,
    ServerPrompt,
    ServerResource,
    given,
    keep,
    known,
    offers_path,
    writing,
)
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("sdk_server.py"))
CITY = PromptArgument("city", "Which one.", True)
STYLE = PromptArgument("style")
REPORT = ServerPrompt("report", "Ask for a report.", (STYLE, CITY))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))
    servers = {"here": {"command": sys.executable, "args": [PROGRAM]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    work = tmp_path / "work"
    work.mkdir()
    (work / "secret.txt").write_text("hush hush")
    monkeypatch.chdir(work)
    return work


# --- in the chat ---


async def test_a_prompt_is_a_command_and_its_text_is_only_text() -> None:
    keep("here", Offers((REPORT, ServerPrompt("hostile"))))
    model = ScriptedBackend([Script("A report."), Script("Well.")])
    async with driven(model) as driver:
        await driver.types("/here__r")
        await driver.shows("here: Ask for a report.")
        await driver.pilot.press("tab")
        await driver.shows("Which one.")
        assert driver.composer.text == "/here__report "
        await driver.types("city=ri")
        await driver.shows("city=Rimini")
        await driver.pilot.press("tab")
        assert driver.composer.text == "/here__report city=Rimini"
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.answers == ["A report."])
        # What the server says attaches nothing, and is no command.
        assert [text for text, _ in model.history] == ["Write a short report about Rimini. @secret.txt"]
        await driver.send("/here__hostile")
        await driver.until(lambda: driver.answers == ["A report.", "Well."])
        assert model.history[-1][0].startswith("/quit x")
        assert len(model.history[-1][0]) < requests.MOST_TEXT + 100
        await driver.send("/here__report")
        assert driver.errors[-1] == "/here__report needs city [style]."
        await driver.send("/here__report style=long")
        await driver.until(lambda: driver.errors[-1] == "/here__report needs city.")


async def test_a_resource_is_attached_by_its_server_and_address() -> None:
    model = ScriptedBackend([Script("I see.")])
    async with driven(model) as driver:
        await driver.types("Read @he")
        await driver.shows("MCP server")
        await driver.pilot.press("tab")
        assert driver.composer.text == "Read @here:"
        await driver.shows("here:note://hello")  # it was asked for, as nobody knew it
        await driver.types("hello")
        await driver.until(lambda: "note://large" not in driver.text())
        await driver.pilot.press("tab", "enter")
        await driver.until(lambda: model.history)
        (message,) = [text for text, _ in model.history]
        assert message == "Read here:note://hello\n\nhere:note://hello:\n````\nHello from the note. ```\n````"
        for name, why in (("note://binary", "is not text"), ("note://none", "Unknown resource")):
            await driver.send(f"And @here:{name}.")
            await driver.until(lambda why=why: bool(driver.errors) and why in driver.errors[-1])  # type: ignore[misc]
            assert len(model.history) == 1
            driver.composer.put("")


def test_a_test_of_a_server_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["mcp", "test", "here"]) == 0
    said = capsys.readouterr().out
    assert "prompt    /here__report city [style]  Ask for a report.\n" in said
    assert "resource  @here:note://hello  A note.\n" in said
    assert "template  @here:city://{name}  A city.\n" in said
    assert said.endswith("here works: 4 tools, 2 prompts, 4 resources.\n")
    assert "\x1b" not in said
    assert find("here__report") is not None
    assert call(["mcp", "remove", "here"]) == 0
    assert find("here__report") is None


def test_completion_goes_from_argument_to_argument() -> None:
    keep("here", Offers((REPORT,)))
    assert [name for name, _ in completions("/here")] == ["here__report"]
    assert choice_completions("/here__report ") == ["/here__report city=", "/here__report style="]
    assert choice_completions("/here__report c") == ["/here__report city="]
    assert choice_completions("/here__report style=x ") == ["/here__report style=x city="]
    assert choice_completions("/here__report city=Rome") == []


# --- what a person writes ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("city=Rome", {"city": "Rome"}),
        ("Rome long", {"style": "long", "city": "Rome"}),
        ("style=long New York", {"style": "long", "city": "New York"}),
        ("city='New York' a b c", {"style": "a b c", "city": "New York"}),
        ("Rome other=x", {"style": "other=x", "city": "Rome"}),
        ("Land's end", {"style": "end", "city": "Land's"}),
    ],
)
def test_arguments_by_name_or_in_order(text: str, found: dict[str, str]) -> None:
    assert given("x", REPORT, text) == found


@of(st.text(max_size=30))
def test_whatever_is_written_is_given_or_refused_in_one_line(text: str) -> None:
    problem = ""
    try:
        assert given("x", REPORT, text)["city"]
    except EngineError as error:
        problem = str(error)
    assert len(problem.splitlines()) <= 1
    asked = writing(REPORT, text)
    if asked is not None:
        again = writing(REPORT, asked.line(text, "v"))
        assert again is not None
        assert (again.name, again.begun) == (asked.name, "v")


def test_help_lists_the_prompts_of_servers_apart_from_the_persons_own(tmp_path: Path) -> None:
    keep("here", Offers((REPORT,)))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "review.md").write_text("Review it.")
    lines = [line_text(line) for line in help_lines(100)]
    own, told, keys = map(lines.index, ("Your prompts", "Prompts of MCP servers", "Keys"))
    assert any("/review" in line for line in lines[own:told])
    assert not any("/here__report" in line for line in lines[own:told])
    assert any("/here__report" in line for line in lines[told:keys])


# --- what a server says ---

ANY = (
    st.none()
    | st.booleans()
    | st.text(max_size=5)
    | st.sampled_from(["a\nb", "\x1b[2J", "x" * 2_000, " ", "="])
)


class Liar:
    """A client whose server says all this, without an end."""

    def __init__(self, **said: list[Any]) -> None:
        self._said = said
        self.server_capabilities = Said(prompts=1, resources=1, completions=1)
        self.pages = 0

    def __getattr__(self, name: str) -> Any:
        async def page(cursor: str | None = None) -> Any:
            self.pages += 1
            items = name.removeprefix("list_")
            return Said(**{items: self._said.get(items, [])}, next_cursor="more")

        return page


ARGUMENTS = st.builds(Said, name=st.text(max_size=5), description=ANY, required=ANY)


@of(
    st.lists(st.builds(Said, name=ANY, title=ANY, description=ANY, arguments=st.none() | st.lists(ARGUMENTS)))
)
def test_whatever_prompts_a_server_has_can_be_shown_kept_and_read(prompts: list[Any]) -> None:
    resources = [Said(uri=p.name, name=p.title, description=p.description, title=None) for p in prompts]
    liar: Any = Liar(prompts=prompts, resources=resources, resource_templates=[])
    offers = asyncio.run(requests.offers(liar))
    assert liar.pages <= 30
    assert len(offers.commands("here")) == len(offers.prompts) <= MOST
    shown = [*offers.commands("here"), *(p.usage for p in offers.prompts), *(r.uri for r in offers.resources)]
    assert all(text.isprintable() and len(text) < 3_000 for text in shown)
    keep("here", offers)
    assert known()["here"] == offers


def test_endless_lists_have_an_end() -> None:
    many = [Said(name=f"p{n}", title="", description="", arguments=[]) for n in range(100_000)]
    offers = asyncio.run(requests.offers(Liar(prompts=many)))  # type: ignore[arg-type]
    assert len(offers.prompts) == MOST


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"prompts": 1}', '{"prompts": [{}], "resources": []}', "[" * 9000]
)
def test_a_file_of_offers_that_is_none_is_as_if_it_were_not_there(text: str) -> None:
    keep("here", Offers((REPORT,)))
    keep("there", Offers((REPORT,), (ServerResource("note://x", "x"),)))
    offers_path("here").unlink()
    offers_path("here").write_text(text)
    assert list(known()) == ["there"]
    assert known()["there"].uri("x") == "note://x"
    assert known()["there"].uri("y") == "y"
