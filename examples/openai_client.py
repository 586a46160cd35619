"""OpenAI's client with a local server (chatterm serve smollm2): pip install openai."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8642/v1", api_key="none")
messages = [{"role": "user", "content": "Name three rivers."}]
stream = client.chat.completions.create(model="smollm2", messages=messages, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
