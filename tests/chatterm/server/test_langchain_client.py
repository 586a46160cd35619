"""LangChain against a real server: a chain, a structured answer, an agent with a tool."""

import pytest
from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.chatterm.server.fake import FakeService, serving


@pytest.fixture(scope="module")
def running():
    with serving(FakeService()) as server:
        yield server


@pytest.fixture
def model(running):
    running.service.__init__()
    return ChatOpenAI(base_url=f"{running.url}/v1", api_key="none", model="tiny", max_retries=0)


class Answer(BaseModel):
    """The answer."""

    value: int


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


def test_a_chain(model):
    chain = ChatPromptTemplate.from_messages([("system", "Be kind."), ("user", "Say {word}")]) | model
    assert chain.invoke({"word": "yes"}).content == "Say yes"
    assert "".join(part.content for part in chain.stream({"word": "no more"})) == "Say no more"


async def test_a_chain_without_blocking(model):
    chain = ChatPromptTemplate.from_messages([("user", "Say {word}")]) | model
    answers = await chain.abatch([{"word": "a"}, {"word": "b"}])
    assert [answer.content for answer in answers] == ["Say a", "Say b"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(model, running, method):
    call = '<tool_call>{"name": "Answer", "arguments": {"value": 3}}</tool_call>'
    said = {"json_schema": '{"value": 3}', "function_calling": call}[method]
    running.service.say = lambda request, index: [("answer", said)]
    assert model.with_structured_output(Answer, method=method).invoke("How many?") == Answer(value=3)
    assert running.service.asked[-1].constraint is not None


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_with_a_tool(model, running, api):
    def say(request, index):
        if request.messages[-1].role == "tool":
            return [("answer", f"It is {request.messages[-1].content}.")]
        return [("answer", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')]

    running.service.say = say
    model = model.model_copy(update={"use_responses_api": api == "responses"})
    agent = create_agent(model, [add])
    answer = agent.invoke({"messages": [{"role": "user", "content": "What is 1 + 1?"}]})
    assert answer["messages"][-1].text == "It is 2."
    streamed = agent.stream(
        {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}, stream_mode="messages"
    )
    assert "".join(part.text for part, _ in streamed if part.type == "AIMessageChunk") == "It is 2."
