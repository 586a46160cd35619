"""A chat with branches: going back to an earlier turn costs nothing, because both paths stay in the cache."""

from engine.engine import Engine
from engine.params import SamplingParams

engine = Engine.load("smollm2")
chat = engine.chat(system="Answer in one short sentence.")
params = SamplingParams(temperature=0, max_tokens=40)


def ask(question: str) -> None:
    """Print the answer to `question` as it arrives, and how much of the prompt was in the cache."""
    print(f"\n> {question}")
    for event in chat.send(question, params):
        print(event.text, end="", flush=True)
    assert chat.last is not None
    stats = chat.last.stats
    print(f"\n  ({stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were in the cache)")


ask("Name a river in Europe.")
ask("Which sea does it flow into?")
first = list(chat.turns)

chat.undo()  # back to the first answer, and another question from there
ask("Which cities lie on it?")

chat.load(first)  # the first branch again: its rows are still there
ask("How long is it?")
engine.close()
