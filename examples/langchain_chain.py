"""A LangChain chain with a local server (chatterm serve smollm2): pip install langchain-openai."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url="http://127.0.0.1:8642/v1", api_key="none", model="smollm2")
prompt = ChatPromptTemplate.from_messages([("system", "Answer in one word."), ("user", "{question}")])
chain = prompt | model
print(chain.invoke({"question": "What is the capital of Peru?"}).content)
