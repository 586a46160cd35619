"""/openapi.json: the paths and their bodies, made from the tables that requests are validated with."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from chatterm.server.http.fields import Table
from chatterm.server.http.ollama.models import SHOW
from chatterm.server.http.ollama.requests import CHAT, GENERATE, OPTIONS
from chatterm.server.http.openai import chat, completions, responses
from chatterm.server.http.openai.models import TOKENIZE

_EVENTS, _LINES, _JSON = "text/event-stream", "application/x-ndjson", "application/json"
_POSTS: Sequence[tuple[str, Table[Any], str, Sequence[str]]] = (
    ("/v1/chat/completions", chat.TABLE, "Answer a conversation", (_JSON, _EVENTS)),
    ("/v1/completions", completions.TABLE, "Complete a text, or token ids", (_JSON, _EVENTS)),
    ("/v1/responses", responses.TABLE, "Answer a conversation, in the newer format", (_JSON, _EVENTS)),
    ("/tokenize", TOKENIZE, "The tokens of a prompt or of messages", (_JSON,)),
    ("/api/chat", CHAT, "Answer a conversation, in Ollama's format", (_JSON, _LINES)),
    ("/api/generate", GENERATE, "Complete a prompt, in Ollama's format", (_JSON, _LINES)),
    ("/api/show", SHOW, "Details of a model", (_JSON,)),
)
_GETS = {
    "/": ("Whether the server is running", "text/plain"),
    "/health": ("200 if the server can answer, else 503", _JSON),
    "/health/live": ("200 as long as the web process runs", _JSON),
    "/health/ready": ("The same as /health", _JSON),
    "/metrics": ("Figures for Prometheus", "text/plain"),
    "/openapi.json": ("This document", _JSON),
    "/v1/models": ("The models of this machine", _JSON),
    "/v1/models/{name}": ("One model", _JSON),
    "/api/tags": ("The models of this machine, in Ollama's format", _JSON),
    "/api/ps": ("The loaded models", _JSON),
    "/api/version": ("The version of Ollama's API that this follows", _JSON),
}
_ERRORS = {
    "400": "Something in the request is wrong; the message says what, and param which field",
    "401": "The key is missing or wrong",
    "403": "The request comes from a web page",
    "404": "The model does not exist",
    "408": "The body took too long",
    "413": "The body is too large",
    "429": "Too many requests are waiting; Retry-After says how many seconds to wait",
    "503": "The server is shutting down, or the engine does not answer",
    "504": "The engine did not finish in time",
}
_PLACE = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


@cache
def document() -> bytes:
    """Return the whole document, as JSON."""
    made, components = _schemas()
    paths: dict[str, Any] = {}
    for path, _, summary, types in _POSTS:
        content = {
            type: {"schema": {"type": "object"} if type == _JSON else {"type": "string"}} for type in types
        }
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {_JSON: {"schema": made[path]}}},
                "responses": _responses(path, content, _ERRORS),
            }
        }
    for path, (summary, type) in _GETS.items():
        content = {type: {"schema": {"type": "object" if type == _JSON else "string"}}}
        errors = {
            code: _ERRORS[code] for code in ("401", "403", "404", "503") if code != "404" or "{" in path
        }
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(path, content, errors)}
        if "{" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        paths[path] = {"get": operation}
    components |= {"Error": _ERROR, "OllamaError": _OLLAMA_ERROR}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "chatterm",
                "version": "1",
                "description": "Models of this machine, over HTTP.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _responses(path: str, content: Mapping[str, Any], errors: Mapping[str, str]) -> dict[str, Any]:
    shape = {"$ref": f"{_PLACE}{'OllamaError' if path.startswith('/api/') else 'Error'}"}
    found: dict[str, Any] = {"200": {"description": "As in the API of that name", "content": content}}
    for code, description in errors.items():
        found[code] = {"description": description, "content": {_JSON: {"schema": shape}}}
    return found


def _schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of each path's body, and the components that they share by name."""
    tables = {path: table for path, table, _, _ in _POSTS} | {"options": OPTIONS}
    kinds = [table.known for table in tables.values()]
    refs, components = msgspec.json.schema_components(kinds, ref_template=f"{_PLACE}{{name}}")
    for ref, table in zip(refs, tables.values(), strict=True):
        _complete(components[ref["$ref"].removeprefix(_PLACE)], table)
    made = dict(zip(tables, refs, strict=True))
    for path in ("/api/chat", "/api/generate"):
        body = components[made[path]["$ref"].removeprefix(_PLACE)]
        body["properties"]["options"] = _or_null(made["options"])
    prompts = components[made["/v1/completions"]["$ref"].removeprefix(_PLACE)]["properties"]
    prompts["prompt"] = {"anyOf": [one | {} for one in _PROMPTS]}
    renamed: list[dict[str, Any]] = _renamed([made, components])
    return renamed[0], renamed[1]


_PROMPTS: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
)


def _renamed(made: Any) -> Any:
    """Rename components whose names two APIs share: `OpenAI.Message` instead of its module here."""
    text = msgspec.json.encode(made).decode()
    for module, name in (("openai", "OpenAI"), ("ollama", "Ollama")):
        text = re.sub(rf"chatterm\.server\.http\.{module}\.\w+\.", f"{name}.", text)
    return msgspec.json.decode(text)


def _or_null(kind: dict[str, Any]) -> dict[str, Any]:
    choices = kind.get("anyOf", [kind])
    return {"anyOf": [*choices, *([] if {"type": "null"} in choices else [{"type": "null"}])]}


def _complete(schema: dict[str, Any], table: Table[Any]) -> None:
    """Adapt a schema to `Table.of`: null means not given; some fields may only have values that change nothing."""
    for name, kind in schema["properties"].items():
        if name not in schema.get("required", ()):
            kind.pop("default", None)
            schema["properties"][name] = _or_null(kind)
    for name, values in table.refused.items():
        schema["properties"][name] = {"enum": [*values, None], "description": "Not supported otherwise."}
