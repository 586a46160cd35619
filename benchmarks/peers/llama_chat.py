"""llama.cpp through llama-cpp-python, as a separate program that keeps one chat in its KV cache.

    python llama_chat.py model.gguf 8192 2            (context, threads)

It imports nothing of chatterm, so that any Python with llama-cpp-python can run it. Requests and replies are lines of
JSON: {"do": "open"} empties the cache, {"do": "ask", "prompt": [ids]} replies with the seconds to the first token and
the number of tokens that were computed for it, {"do": "hear", "stream": [ids]} takes in the text that was written next.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    sys.path.pop(0)  # this folder has modules with the names of packages
    from llama_cpp import Llama, __version__

    path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Its defaults, except for the context, the threads (by default one core of two is unused) and its messages.
    llama = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    computed = 0
    evaluate = llama.eval

    def counted(tokens: list[int]) -> None:
        nonlocal computed
        computed += len(tokens)
        evaluate(tokens)

    llama.eval = counted
    reply({"version": __version__})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if request["do"] == "open":
            llama.reset()
            reply({})
        elif request["do"] == "ask":
            computed = 0
            began = time.perf_counter()
            answer = llama.generate(request["prompt"], temp=0.0)  # it finds the longest common prefix itself
            next(answer)
            reply({"ttft_s": time.perf_counter() - began, "computed": computed})
            answer.close()
        else:
            llama.eval(request["stream"])
            reply({})


def reply(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
