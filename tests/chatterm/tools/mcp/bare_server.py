"""A server without the SDK, whose import takes longer than most tests, and ways in which it misbehaves."""

import json
import os
import sys
import time
from typing import Any

KIND = sys.argv[1] if len(sys.argv) > 1 else "good"


def add(a: int, b: int) -> str:
    return str(a + b)


def secret(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "nothing")


def pid() -> str:
    return str(os.getpid())


def die() -> str:
    os._exit(3)


def pour() -> str:
    """Send a line without an end, and write as much on standard error."""
    os.write(2, b"e" * 3_000_000)
    while True:
        os.write(1, b"x" * 65_536)


def wait() -> str:
    time.sleep(1000)
    return "never"


TOOLS = (add, secret, pid, die, pour, wait)


def described(tool: Any) -> dict[str, Any]:
    kinds = {int: "integer", str: "string"}
    takes = {name: kind for name, kind in tool.__annotations__.items() if name != "return"}
    properties = {name: {"type": kinds[kind]} for name, kind in takes.items()}
    schema = {"type": "object", "properties": properties, "required": list(takes)}
    return {"name": tool.__name__, "description": tool.__doc__ or "", "inputSchema": schema}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            info = {"name": "test", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [described(tool) for tool in TOOLS]}
        case "tools/call":
            (tool,) = (tool for tool in TOOLS if tool.__name__ == params["name"])
            return {"content": [{"type": "text", "text": tool(**params.get("arguments", {}))}]}
    return {}


if __name__ == "__main__":
    if KIND == "silent":
        time.sleep(1000)
    while KIND == "flood":
        sys.stdout.write("x" * 65_536)
    if KIND == "dead":
        sys.exit("no such luck")
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
