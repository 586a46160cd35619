"""Models of every format that call tools in a chat: what is computed, what comes back, what another one makes of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends import tool_calls
from chatterm.backends.backend import ChatOptions, Document, EngineError, Exchange, Tool, ToolCall, ToolResult
from chatterm.backends.documents import with_documents
from chatterm.backends.local import LocalBackend
from engine.cache.offload import common_prefix
from engine.conversation.prompt import PromptFormat
from engine.params import Constraint
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.chatterm.server.conftest import Tinies, written
from tests.counting import until
from tests.engine.chat_formats import TEMPLATES, segments, tokenizer_of
from tests.engine.tiny import TinyEngine, tiny_tokenizer

WEATHER = Tool(
    "weather",
    "Looks out of the window.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        "required": ["city"],
    },
)
GIVEN = '{"city": "Köln \\"am\\" Rhein", "days": 2.0}'
RESULT = 'rain, 9 °C\n"wet"'
GLUE = 90
"""What the longest template writes between a call and the next answer, in letters."""


class Talk:
    """A chat with a model whose words are scripted."""

    def __init__(self, backend: LocalBackend, engine: TinyEngine) -> None:
        self.backend, self.engine = backend, engine
        self.path: list[Exchange] = []

    def _took(self, events: Iterator[Any], user: str, results: list[ToolResult]) -> Exchange:
        taken = list(events)
        last = self.backend.last
        assert last is not None
        assert "".join(event.text for event in taken if event.kind == "answer").strip() == last.text.strip()
        model = self.backend.info.name if self.backend.info else ""
        made = Exchange(len(self.path) + 1, None, user, results=results, model=model)
        made.take(last)
        self.path.append(made)
        return made

    def says(self, text: str) -> None:
        self.engine.scripted.script = self.engine.tokenizer.encode(text)

    def ask(self, text: str, says: str) -> Exchange:
        self.says(says)
        return self._took(self.backend.send(text), text, [])

    def tell(self, text: str, says: str) -> Exchange:
        self.says(says)
        results = [ToolResult(call.name, call.arguments, text) for call in self.path[-1].calls]
        return self._took(self.backend.tell(results), "", results)


@pytest.fixture(params=FORMATS, ids=str)
def format(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, 4096)


@pytest.fixture
def opened(checkpoint: Path) -> Iterator[Callable[..., Talk]]:
    tinies = Tinies(checkpoint)
    backends: list[LocalBackend] = []

    def opened(tokenizer: Any, **options: Any) -> Talk:
        tinies.options["tokenizer"] = tokenizer
        backend = LocalBackend("tiny", ChatOptions(**options), tinies)
        backend.open()
        backends.append(backend)
        return Talk(backend, tinies.made[-1])

    yield opened
    for backend in backends:
        backend.close()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grammar: what it forces is not drawn, and so not in a script."""
    monkeypatch.setattr(tool_calls.Calling, "constraint", lambda self, engine, given: given)


def computed(exchange: Exchange) -> float:
    return exchange.stats["prefilled_tokens"]


@pytest.mark.usefixtures("free")
def test_after_a_result_only_the_result_is_computed(opened: Callable[..., Talk], format: Format) -> None:
    system = "Be brief." if format.name != "mistral" else None
    talk = opened(format.tokenizer(), tools=(WEATHER,), system=system, think=format.think)
    asked = talk.ask(
        "What is it like outside?", format.called("weather", GIVEN, "I have to look at that first.")
    )
    assert asked.calls == [ToolCall("weather", asked.calls[0].arguments)]
    assert json.loads(asked.calls[0].arguments) == json.loads(GIVEN)
    assert "weather" not in asked.text
    called = format.called("weather", GIVEN, "And once more.")
    assert computed(talk.tell(RESULT, called)) <= len(RESULT.encode()) + GLUE
    told = talk.tell(RESULT, format.answered("It rains.", "Wet it is."))
    assert computed(told) <= len(RESULT.encode()) + GLUE
    assert (told.text.strip(), told.calls) == ("It rains.", [])
    talk.backend.settle()
    assert talk.engine is not None
    again = talk.ask("And tomorrow?", format.answered("It snows."))
    assert again.text.strip() == "It snows."
    talk.engine.check()


def test_only_a_tool_whose_schema_no_grammar_can_express_takes_anything(
    opened: Callable[..., Talk], format: Format
) -> None:
    odd = Tool(
        "odd", "Takes what is no text.", {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    )
    engine = opened(format.tokenizer(), tools=(WEATHER, odd)).engine
    for given in (None, Constraint("regex", "yes|no")):
        offered = tool_calls.Calling.of(engine.tokenizer, (WEATHER, odd))
        assert offered is not None
        found = offered.constraint(engine, given)
        assert found is not None
        assert "days" in found.text
        assert '"not"' not in found.text


@pytest.mark.usefixtures("free")
def test_thoughts_that_led_to_an_answer_are_hidden_at_once(opened: Callable[..., Talk]) -> None:
    """The next message computes itself and the template's glue, also after the conversation was loaded again."""
    for format in (FORMATS[0], FORMATS[3]):
        talk = opened(format.tokenizer(), tools=(WEATHER,), think_cache="mask")
        talk.ask("What is it like outside?", format.called("weather", GIVEN, "I have to look at that first."))
        talk.tell(RESULT, format.called("weather", GIVEN, "And once more."))
        talk.tell(RESULT, format.answered("It rains.", "Wet it is."))
        masked = talk.backend.chat.history  # type: ignore[union-attr]
        assert "It rains." in talk.engine.tokenizer.decode(masked.token_ids[: masked.masked_until])
        assert (
            computed(talk.ask("And tomorrow?", format.answered("It snows."))) <= len("And tomorrow?") + GLUE
        )
        talk.backend.load_path([])
        talk.engine.evict_all()
        talk.backend.load_path(talk.path)
        talk.backend.settle()
        assert talk.backend.chat is not None
        talk.backend.chat.settle(wait=True)
        assert computed(talk.ask("And then?", format.answered("It thaws."))) <= len("And then?") + GLUE
        after = talk.backend.chat.history
        assert (after.keys[: len(masked)], after.positions[: len(masked)]) == (masked.keys, masked.positions)
        talk.engine.check()


@pytest.mark.usefixtures("free")
def test_a_prompt_may_open_the_thinking_after_results_only(opened: Callable[..., Talk]) -> None:
    """As Gemma 4's does, where it goes on in the same turn."""
    gemma = FORMATS[6]
    goes_on = "{%- if add_generation_prompt and state.open and enable_thinking %}"
    template = gemma.template + goes_on + "{{- '<|channel>thought\\n' }}{%- endif %}"
    tokenizer = tiny_tokenizer(template, gemma.markers, gemma.special)
    talk = opened(tokenizer, tools=(WEATHER,), think="on")
    talk.ask("What is it like outside?", gemma.called("weather", GIVEN, "I have to look."))
    for number in range(2):
        thought = f"And once more, {number}."
        said = gemma.called("weather", GIVEN, thought).removeprefix("<|channel>thought\n")
        told = talk.tell(RESULT, said)
        assert (told.reasoning.strip(), told.text, len(told.calls)) == (thought, "", 1)
        assert number == 0 or computed(told) <= len(RESULT.encode()) + GLUE
    told = talk.tell(RESULT, gemma.answered("It rains.", "Wet.").removeprefix("<|channel>thought\n"))
    assert (told.reasoning.strip(), told.text) == ("Wet.", "It rains.")
    talk.backend.settle()
    assert talk.ask("And tomorrow?", gemma.answered("It snows.")).text == "It snows."
    talk.engine.check()


@pytest.mark.usefixtures("free")
def test_a_branch_of_a_saved_conversation_with_calls_computes_nothing_twice(
    opened: Callable[..., Talk], format: Format
) -> None:
    talk = opened(format.tokenizer(), tools=(WEATHER,))
    talk.ask("What is it like outside?", format.called("weather", GIVEN))
    talk.tell(RESULT, format.answered("It rains."))
    path = [Exchange(**{name: getattr(e, name) for name in Exchange.__slots__}) for e in talk.path]
    talk.backend.load_path([])
    talk.backend.load_path(path[:1])
    talk.path = path[:1]
    told = talk.tell(RESULT, format.answered("Rain it is."))
    assert computed(told) <= len(RESULT.encode()) + GLUE
    assert told.text.strip() == "Rain it is."


@pytest.mark.usefixtures("free")
def test_a_retry_answers_the_results_again_and_tools_that_are_off_stay_in_the_history(
    opened: Callable[..., Talk], format: Format
) -> None:
    talk = opened(format.tokenizer(), tools=(WEATHER,))
    talk.ask("What is it like outside?", format.called("weather", GIVEN))
    talk.tell(RESULT, format.answered("It rains."))
    talk.path = talk.path[:1]
    talk.backend.load_path(talk.path)
    assert talk.tell(RESULT, format.answered("Still rain.")).text.strip() == "Still rain."
    talk.backend.configure({"tools": ()})
    assert talk.ask("Thanks!", format.answered("Fine.")).text.strip() == "Fine."


@pytest.mark.usefixtures("free")
def test_a_call_that_nobody_answered_is_told_so(opened: Callable[..., Talk], format: Format) -> None:
    talk = opened(format.tokenizer(), tools=(WEATHER,))
    talk.ask("What is it like outside?", format.called("weather", GIVEN))
    prompts: list[str] = []
    start = talk.engine.start

    def started(rows: Any, *arguments: Any) -> Any:
        prompts.append(talk.engine.tokenizer.decode(rows.token_ids, skip_special=False))
        return start(rows, *arguments)

    talk.engine.start = started  # type: ignore[method-assign]
    talk.ask("Never mind.", format.answered("Fine."))
    assert "This was not run." in prompts[0]


@pytest.mark.usefixtures("free")
def test_calls_of_another_model_are_written_as_this_ones_template_does(opened: Callable[..., Talk]) -> None:
    hermes, llama = FORMATS[0], FORMATS[1]
    talk = opened(hermes.tokenizer(), tools=(WEATHER,))
    talk.ask("What is it like outside?", hermes.called("weather", GIVEN))
    talk.tell(RESULT, hermes.answered("It rains."))
    other = opened(llama.tokenizer(), tools=(WEATHER,))
    for exchange in talk.path:
        exchange.model = "another"
    other.backend.load_path(talk.path)
    assert other.ask("Thanks!", llama.answered("Fine.")).text.strip() == "Fine."


@pytest.mark.usefixtures("free")
def test_foreign_ids_that_hide_something_are_not_believed(opened: Callable[..., Talk]) -> None:
    hermes = FORMATS[0]
    talk = opened(hermes.tokenizer(), tools=(WEATHER,))
    asked = talk.ask("What is it like outside?", hermes.called("weather", GIVEN))
    hidden = talk.engine.tokenizer.token_id("<|im_start|>")
    assert hidden is not None
    asked.token_ids.insert(3, hidden)
    asked.shown = (0, len(asked.token_ids) - 1)
    talk.backend.load_path([])
    talk.backend.load_path([asked])
    chat: Any = talk.backend.chat
    assert hidden not in chat.turns[0].answer.token_ids


@pytest.mark.usefixtures("free")
def test_thinking_is_no_call_and_what_only_looks_like_one_is_text(opened: Callable[..., Talk]) -> None:
    hermes = FORMATS[0]
    talk = opened(hermes.tokenizer(), tools=(WEATHER,))
    thought = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    told = talk.ask("Hm?", hermes.answered("Write <tool_call> and { to call.", thought))
    assert (told.calls, told.text.strip()) == ([], "Write <tool_call> and { to call.")


def test_no_call_is_malformed(opened: Callable[..., Talk]) -> None:
    """Whatever a model draws (this one draws at random), once it calls something it is a call that fits."""
    talk = opened(FORMATS[0].tokenizer(), tools=(WEATHER,), sampling={"max_tokens": 400, "seed": 1})
    talk.says("Well. <tool_call>")
    list(talk.backend.send("Go on."))
    said = talk.backend.last
    assert said is not None
    for call in said.calls:
        assert call.name == "weather"
    chat: Any = talk.backend.chat
    written = talk.engine.tokenizer.decode(chat.turns[-1].answer.token_ids)
    assert written.startswith('Well. <tool_call>\n{"name": "weather", "arguments": {"city": "')


def test_a_model_that_knows_no_tools_says_so(opened: Callable[..., Talk]) -> None:
    talk = opened(tiny_tokenizer())
    assert talk.backend.info is not None
    assert not talk.backend.info.calls_tools
    with pytest.raises(EngineError, match="does not support tools"):
        talk.backend.configure({"tools": (WEATHER,)})
    talk.backend.configure({"tools": ()})


def test_results_need_calls(opened: Callable[..., Talk]) -> None:
    talk = opened(FORMATS[0].tokenizer(), tools=(WEATHER,))
    with pytest.raises(EngineError, match="calls no tools"):
        next(talk.backend.tell([ToolResult("weather", "{}", "x")]))


@pytest.mark.usefixtures("free")
def test_documents_are_computed_before_the_first_message_with_tools_too(
    opened: Callable[..., Talk], format: Format
) -> None:
    talk = opened(format.tokenizer(), tools=(WEATHER,))
    paper = Document("paper", "A paper of some length. " * 20)
    talk.backend.configure({"documents": (paper,)})
    assert talk.backend.chat is not None
    whole = len(talk.backend.chat.begun_with(paper.text))
    until(lambda: all(chunk.is_read for chunk in talk.engine.chunks.list()))
    asked = talk.ask("What is it about?", format.answered("It is short.", "It is long."))
    assert asked.stats["cached_tokens"] >= whole
    assert computed(asked) < len(paper.text) / 2


def test_every_template_begins_with_the_documents_whatever_is_asked() -> None:
    system = with_documents("Be brief.", [Document("paper", "A paper of some length. " * 20)])
    for template in TEMPLATES.values():
        format = PromptFormat(tokenizer_of("bytes", template))
        (begins,) = segments(format, system, [], [], generate=False)
        (asked,) = segments(format, system, ["what is it about?"], [], generate=True)
        assert 300 < len(begins) <= common_prefix(begins, asked) + 2, template
