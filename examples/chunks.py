"""A document that is computed once: every question about it reads it from the cache."""

from pathlib import Path

from engine.engine import Engine
from engine.params import SamplingParams

engine = Engine.load("smollm2")
document = f"You answer questions about this text.\n\n{Path(__file__).with_name('README.md').read_text()}"
engine.chunks.keep(engine.chat(system=document).history.token_ids, "readme", wait=True)
for question in ("What is in this folder?", "Which example needs curl?"):
    chat = engine.chat(system=document)
    print("".join(event.text for event in chat.send(question, SamplingParams(temperature=0, max_tokens=40))))
    stats = chat.last.stats
    print(f"({stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were in the cache)")
print(*engine.chunks.list(), sep="\n")
engine.close()
