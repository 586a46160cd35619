"""The HTTP API: the routes."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chatterm.server.http.body import read_body
from chatterm.server.http.endpoint import Endpoint, ServerState
from chatterm.server.http.errors import broken, error_for, error_headers
from chatterm.server.http.fields import Ignored, S, Table, json_object
from chatterm.server.http.guard import Guard
from chatterm.server.http.keys import ApiKeys
from chatterm.server.http.limits import AdmissionQueue, Limits
from chatterm.server.http.metrics import CONTENT_TYPE, exposition
from chatterm.server.http.ollama.models import SHOW, VERSION, running, show_response, tag
from chatterm.server.http.ollama.requests import NAMES, load_chat, load_generate, parse_chat, parse_generate
from chatterm.server.http.openai import chat, completions, responses
from chatterm.server.http.openai.models import TOKENIZE, model_object, tokenized
from chatterm.server.http.openapi import document
from chatterm.server.http.request_log import ENTRY, RequestEntry, RequestLog
from chatterm.server.http.sse import ClientGone
from chatterm.server.service import RequestError, ServedModel, Service

_NDJSON = b"application/x-ndjson"


def make_app(
    service: Service,
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    is_strict: bool = False,
    log: RequestLog | None = None,
) -> Starlette:
    """Build the API of `service`. With `keys`, every path but those of /health needs one of them.

    `is_strict`: fields that have no effect are refused, which are ignored otherwise.
    """
    limits = limits or Limits()
    site = ServerState(service, limits, AdmissionQueue(limits), log or RequestLog(), is_strict)
    service.watch(site.gate.queued)
    generating = {
        "/v1/chat/completions": Endpoint(site, chat.parse),
        "/v1/completions": Endpoint(site, completions.parse, names=completions.NAMES),
        "/v1/responses": Endpoint(site, responses.parse, names=responses.NAMES),
        "/api/chat": Endpoint(site, parse_chat, _NDJSON, load_chat, NAMES),
        "/api/generate": Endpoint(
            site, parse_generate, _NDJSON, load_generate, {**NAMES, "messages": "prompt"}
        ),
    }
    app = _Api(
        generating,
        keys,
        site.log,
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
            *_others(site),
        ],
        middleware=[Middleware(Guard, keys=keys)],
        exception_handlers={
            RequestError: _error,
            HTTPException: _no_route,
            ClientGone: _gone,
            Exception: lambda request, error: _error(request, broken()),
        },
    )
    app.state.site = site
    app.state.has_key = keys is not None
    return app


class _Api(Starlette):
    """Dispatches generating paths directly, as routes and middleware would double the cost of a request here."""

    def __init__(
        self, generating: Mapping[str, Endpoint], keys: ApiKeys | None, log: RequestLog, **options: Any
    ) -> None:
        super().__init__(**options)
        self._log = log
        self._generating = {path: Guard(endpoint, keys) for path, endpoint in generating.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        entry = scope[ENTRY] = RequestEntry.of(scope)
        endpoint = self._generating.get(entry.path) if entry.method == "POST" else None
        try:
            await (endpoint or super().__call__)(scope, receive, send)
        finally:
            self._log.finished(entry)


def _others(site: ServerState) -> list[Route]:
    """Return the routes that generate nothing."""
    service = site.service

    async def ready(request: Request) -> Response:
        if (trouble := site.trouble) is not None:
            return _json({"status": "not ready", "reason": trouble}, 503)
        return _json({"status": "ok"})

    async def live(request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        page = exposition(site.recorder, site.gate, await service.metrics(), service.health())
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def known() -> list[ServedModel]:
        with suppress(RequestError):  # then the list is a moment old
            await service.look()
        return service.models()

    async def models(request: Request) -> Response:
        return _json(
            {"object": "list", "data": [model_object(model, site.limits) for model in await known()]}
        )

    async def one_model(request: Request) -> Response:
        return _json(model_object(await site.model(request.path_params["name"]), site.limits))

    async def tokenize(request: Request) -> Response:
        given = _read(TOKENIZE, await _body(request, site), request, site)
        return _json(await tokenized(given, await site.model(given.model), service, site.limits))

    async def tags(request: Request) -> Response:
        return _json({"models": [tag(model) for model in await known()]})

    async def loaded(request: Request) -> Response:
        return _json({"models": [running(model) for model in await known() if model.loaded]})

    async def show(request: Request) -> Response:
        body = await _body(request, site)
        given = _read(SHOW, {"model": body.pop("name", None), **body}, request, site)
        return _json(show_response(await site.model(given.model)))

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    async def version(request: Request) -> Response:
        return _json({"version": VERSION})

    async def root(request: Request) -> Response:
        return PlainTextResponse("chatterm is running")

    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": root,
        "/health": ready,
        "/health/live": live,
        "/health/ready": ready,
        "/metrics": metrics,
        "/openapi.json": openapi,
        "/v1/models": models,
        "/v1/models/{name:path}": one_model,
        "/api/tags": tags,
        "/api/ps": loaded,
        "/api/version": version,
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/api/show", show, methods=["POST"]),
    ]


async def _body(request: Request, site: ServerState) -> dict[str, Any]:
    return json_object(await read_body(request.scope, request.receive, site.limits))


def _read(table: Table[S], body: dict[str, Any], request: Request, site: ServerState) -> S:
    """Convert a body, and log what is ignored of it. Raises RequestError."""
    ignored = Ignored(site.is_strict)
    given = table.of(body, ignored)
    site.log.ignored(request.scope[ENTRY], ignored.names)
    return given


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request.scope[ENTRY].refuse(error)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _json(error_for(request.url.path, error), error.status, {**headers, "connection": "close"})


def _gone(request: Request, error: Exception) -> Response:
    request.scope[ENTRY].status = 499
    return Response(status_code=499)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "does not exist" if error.status_code == 404 else f"does not take {request.method[:20]}"
    message = f"{request.url.path[:200]} {what} here; docs/server.md lists the paths."
    response = _error(
        request, RequestError(error.status_code, "not_found_error", message, code="unknown_url")
    )
    response.headers.update(error.headers or {})  # which methods the path takes
    return response
