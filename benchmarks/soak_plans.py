"""Requests of a soak: each is made from a number, and the essence of its answer does not depend on when it is asked."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

_WORDS = (
    "river mountain lamp seven copper quiet engine window orchard letter harbour winter bridge pencil thunder "
    "saddle violet kettle marble paper needle candle garden ribbon anchor barrel copper meadow ladder basket"
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["river", "lake", "sea"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 16}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid request."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def text_of(random: Random, words: int) -> str:
    """Return a question of about `words` words."""
    return f"Say something about a {' '.join(random.choices(_WORDS.split(), k=random.randint(2, words)))}."


def plan(number: int, model: str, *, tools: bool = True) -> Plan:
    """Return the plan of this number; four in ten chats begin with one of three system prompts.

    `tools`: whether the model can call any.
    """
    random = Random(number)
    kinds = ["chat", "chat", "chat", "turns", "several", "likely", "schema", "regex", "completion", "ids"]
    kinds += ["responses", "ollama", "generate", "penalties"] + ["tools", "forced"] * tools
    kind = kinds[number % len(kinds)]
    user = {"role": "user", "content": text_of(random, 40)}
    messages = [user]
    if random.random() < 0.4:
        messages.insert(0, {"role": "system", "content": text_of(Random(number % 3), 60)})
    body: dict[str, Any] = {
        "model": model,
        "stream": random.random() < 0.75,
        "seed": number,
        "temperature": random.choice((0.0, 0.8, 1.1)),
        "max_tokens": random.choice((1, 8, 24, 40)),
    }
    path = "/v1/chat/completions"
    match kind:
        case "turns":
            messages += [
                {"role": "assistant", "content": text_of(random, 20)},
                {"role": "user", "content": "Go on."},
            ]
        case "several":
            body["n"] = random.randint(2, 4)
        case "likely":
            body |= {"logprobs": True, "top_logprobs": random.randint(0, 5)}
        case "schema":
            body |= {
                "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}
            }
            body["max_tokens"] = 80
        case "regex":
            body["structured_outputs"] = {"regex": "(yes|no), (river|lake) [0-9]{1,4}"}
        case "penalties":
            body |= {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {"11": -5, "200": 2}}
            body["stop"] = ["ing", "\n\n"]
        case "tools":
            body["tools"] = [_TOOL]
        case "forced":
            body |= {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 80}
        case "completion":
            path = "/v1/completions"
            body["prompt"] = random.choice((user["content"], [user["content"], "Once upon"]))
        case "ids":
            path = "/v1/completions"
            body |= {
                "prompt": [random.randrange(20, 400) for _ in range(random.randint(1, 60))],
                "logprobs": 2,
            }
        case "responses":
            path = "/v1/responses"
            body = {name: body[name] for name in ("model", "stream", "temperature")}
            body |= {"input": user["content"], "max_output_tokens": 24, "temperature": 0.0}
        case "ollama" | "generate":
            path = "/api/chat" if kind == "ollama" else "/api/generate"
            options = {"seed": number, "temperature": body["temperature"], "num_predict": body["max_tokens"]}
            body = {"model": model, "stream": body["stream"], "options": options}
            if kind == "generate":
                body["prompt"] = user["content"]
    if path in ("/v1/chat/completions", "/api/chat"):
        body["messages"] = messages
    return Plan(number, kind, path, body)


def essence(plan: Plan, data: bytes) -> list[Any]:
    """Return what matters of a whole response to `plan`: texts, calls, reasons, log-probabilities, numbers of tokens.

    It is the same whether streamed or not. Raises ValueError if the response is not an answer, or is incomplete.
    """
    pieces = list(_pieces(plan, data))
    if problems := [piece["error"] for piece in pieces if piece.get("error")]:
        raise ValueError(f"an error: {problems[0]}")
    if plan.path.startswith("/api/"):
        if not pieces or pieces[-1].get("done") is not True:
            raise ValueError("the answer has no end")
        texts = [piece["message"]["content"] if "message" in piece else piece["response"] for piece in pieces]
        return [
            "".join(texts),
            pieces[-1]["done_reason"],
            pieces[-1]["eval_count"],
            pieces[-1]["prompt_eval_count"],
        ]
    if plan.path == "/v1/responses":
        whole = pieces[-1]["response"] if plan.streams else pieces[-1]
        if whole["status"] not in ("completed", "incomplete"):
            raise ValueError(f"the response is {whole['status']}")
        said = [[part["text"] for part in item.get("content", ())] for item in whole["output"]]
        return [said, whole["status"], whole["usage"]["output_tokens"], whole["usage"]["input_tokens"]]
    return _choices(pieces)


def _pieces(plan: Plan, data: bytes) -> Iterator[dict[str, Any]]:
    if not plan.streams:
        yield json.loads(data)
    elif plan.path.startswith("/api/"):
        yield from map(json.loads, data.splitlines())
    else:
        lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
        if plan.path != "/v1/responses" and (not lines or lines.pop() != b"[DONE]"):
            raise ValueError("the stream has no end")
        yield from map(json.loads, lines)


def _choices(pieces: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the essence of OpenAI's choices, in pieces or whole."""
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "calls": {}, "reason": None, "likely": []})
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            one["text"] += said.get("content") or ""
            one["reason"] = choice.get("finish_reason") or one["reason"]
            for number, call in enumerate(said.get("tool_calls") or ()):
                known = one["calls"].setdefault(call.get("index", number), ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            _add_likely(one["likely"], choice.get("logprobs"))
    if not found or any(one["reason"] is None for one in found.values()):
        raise ValueError("an answer has no end")
    return [found[index] for index in sorted(found)]


def _add_likely(likely: list[Any], given: dict[str, Any] | None) -> None:
    if given is None:
        return
    if "token_logprobs" in given:
        likely.extend(zip(given["tokens"], given["token_logprobs"], strict=True))
    else:
        likely.extend(
            (token["token"], token["logprob"], len(token["top_logprobs"])) for token in given["content"] or ()
        )


def garbage(random: Random, model: str) -> bytes:
    """Return the bytes of a wrong request, or of no request at all."""
    body = json.dumps(plan(random.randrange(1000), model).body).encode()
    good = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    wrong = [
        b'{"model": 7}',
        b'{"model": "nothing here", "messages": []}',
        b"[" * 3000,
        b"\xff\xfe\x00",
        body[: random.randrange(len(body))],
        json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "x"}], "temperature": -7}
        ).encode(),
        json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}], "audio": {}}).encode(),
        json.dumps({"model": model, "messages": [{"role": "user", "content": "word " * 200_000}]}).encode(),
    ]
    chosen = random.choice(wrong)
    return random.choice(
        (
            good + f"Content-Length: {len(chosen)}\r\n\r\n".encode() + chosen,
            good + f"Content-Length: {len(chosen) + 9}\r\n\r\n".encode() + chosen,
            good + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            random.randbytes(random.randrange(1, 200)),
            b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n",
            b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        )
    )
