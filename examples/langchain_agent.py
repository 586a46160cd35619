"""A LangChain agent with a tool (start chatterm serve qwen3:0.6b): pip install langchain langchain-openai."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def length(word: str) -> int:
    """Return the number of letters of a word."""
    return len(word)


model = ChatOpenAI(base_url="http://127.0.0.1:8642/v1", api_key="none", model="qwen3:0.6b")
question = {"role": "user", "content": "How many letters does Mississippi have?"}
print(create_agent(model, [length]).invoke({"messages": [question]})["messages"][-1].content)
