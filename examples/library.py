"""The engine as a library, without a server: earlier turns stay in its cache."""

from engine.engine import Engine
from engine.params import SamplingParams

engine = Engine.load("smollm2")
chat = engine.chat(system="Answer briefly.")
for question in ("Name three rivers.", "Which of them is the longest?"):
    for event in chat.send(question, SamplingParams(temperature=0, max_tokens=60)):
        print(event.text, end="", flush=True)
    print(
        f"\n({chat.last.stats.cached_tokens} of {chat.last.stats.prompt_tokens} prompt tokens were in the cache)"
    )
engine.close()
