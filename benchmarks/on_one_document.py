"""The KV of several conversations on one document, compared with one of them plus the turns of the others.

python -m benchmarks.on_one_document [MODEL] [--tokens 4000] [--conversations 8] [--answer 32] [--device auto]
"""

import argparse

from benchmarks.resume import SENTENCE
from engine.engine import Engine
from engine.params import SamplingParams
from models.units import bytes_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    context = arguments.tokens + arguments.conversations * 4 * arguments.answer
    engine = Engine.load(arguments.model, device=arguments.device, context=context)
    try:
        each = len(engine.tokenizer.encode(SENTENCE * 10)) // 10
        document = SENTENCE * (arguments.tokens // each + 1)
        params = SamplingParams(temperature=0.0, max_tokens=arguments.answer)
        taken: list[int] = []
        turns: list[int] = []
        for number in range(arguments.conversations):
            chat = engine.chat(document)
            list(chat.send(f"{number} times: which of the two lights is white?", params))
            chat.settle(wait=True)
            turns.append(len(chat.history) - len(chat.begun_with(document)))
            blocks = engine.loop.call(lambda: engine.pieces.blocks.num_blocks - engine.pieces.blocks.num_free)
            taken.append(blocks * engine.block_size * engine.kv_token_bytes)
        own = sum(turns[1:]) * engine.kv_token_bytes
        print(
            f"{arguments.model}, a document of {len(chat.begun_with(document)):,} tokens, blocks of {engine.block_size}"
        )
        print(f"one conversation              {bytes_text(taken[0]):>9}")
        print(f"{arguments.conversations} conversations               {bytes_text(taken[-1]):>9}")
        print(f"turns of all but the first    {bytes_text(own):>9}")
        print(f"beside one and these turns    {taken[-1] / (taken[0] + own):8.3f}x")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
