"""The models of a server, and which of them an address means."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import replace

from chatterm.backends.backend import EngineError, OnProgress, Progress
from chatterm.backends.remote.address import Address, Api
from chatterm.backends.remote.client import Client, Lost
from chatterm.backends.remote.dialects.base import Dialect, ListedModel
from chatterm.backends.remote.dialects.chat import ChatCompletions
from chatterm.backends.remote.dialects.ollama import Ollama
from chatterm.backends.remote.dialects.responses import Responses
from chatterm.backends.remote.errors import Refused, explain_refusal, said_by
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.wording import sentences

PATIENCE = 20.0
"""Time limit in seconds for a list of models while the user waits for a conversation."""
_LOOK = 0.1
"""Seconds between two checks whether the user still waits."""
_LISTS_ALL = frozenset({"vllm", "sglang", "ollama"})
"""Servers whose list is complete: a model that is not listed does not exist there."""
_SHOWN = 8
"""Most models named in an error."""
_HOSTS: Mapping[str, str] = {
    "api.openai.com": "openai",
    "openrouter.ai": "openrouter",
    "api.deepseek.com": "deepseek",
}


def choose_dialect(api: Api) -> Dialect:
    dialects: Mapping[Api, Dialect] = {
        "chat": ChatCompletions(),
        "responses": Responses(),
        "ollama": Ollama(),
    }
    return dialects[api]


def list_models(
    client: Client,
    dialect: Dialect,
    has_key: bool,
    on_progress: OnProgress | None = None,
    seconds: float = PATIENCE,
) -> list[ListedModel] | None:
    """Return the models of the server; None if it does not list them. Raises EngineError."""
    address = client.address
    future = client.get(dialect.models_path, seconds)
    try:
        while True:
            if on_progress is not None:
                on_progress(Progress("load", f"the models of {one_line(address.host, 60)}", 0, None))
            with suppress(NotYet):
                got = future.result(timeout=_LOOK)
                break
    except BaseException:
        future.cancel()
        raise
    if isinstance(got, Lost):
        raise EngineError(got.line)
    if isinstance(got, Refused):
        if got.status in (401, 403, 407) or 300 <= got.status < 400 or got.status >= 500:
            raise EngineError(explain_refusal(got, address, has_key))
        return None  # not every server has such a list
    try:
        return dialect.listed(json.loads(got))
    except (ValueError, RecursionError):
        return None


def resolve_model(address: Address, models: Sequence[ListedModel] | None) -> Address:
    """Return `address` with a model. Raises EngineError if no model is named or the server does not have it."""
    host = one_line(address.host, 80)
    if not address.model:
        if models is not None and len(models) == 1:
            return replace(address, model=models[0].name)
        which = quote_names(models) if models else "see its documentation"
        raise EngineError(f"{host} needs the name of a model: {address.prefix}/MODEL. Its models: {which}.")
    kinds = {model.server for model in models or ()}
    is_complete = kinds <= _LISTS_ALL if kinds else address.api == "ollama"
    if models is not None and find_entry(address, models) is None and is_complete:
        where = f"; it has: {quote_names(models)}" if models else "; it has none yet"
        raise EngineError(f"{host} has no model {one_line(address.model, 80)}{where}.")
    return address


def find_entry(address: Address, models: Sequence[ListedModel] | None) -> ListedModel | None:
    """Return the list entry of the model in `address`; Ollama leaves `:latest` out."""
    names = (address.model, f"{address.model}:latest")
    return next((model for model in models or () if model.name in names), None)


def not_found(refused: Refused, address: Address, models: Sequence[ListedModel]) -> str:
    """Explain a 404 in one line, of a server that lists these models."""
    here = find_entry(address, models)
    if here is None:
        return f"{explain_refusal(refused, address, False)} It has: {quote_names(models)}."
    others = [model for model in models if model is not here]
    also = f"; it also has: {quote_names(others)}" if others else ""
    return sentences(
        f"{one_line(address.host, 80)} lists {one_line(here.name, 80)}, but does not answer with it (404)",
        said_by(refused.body),
        f"It may not be a model for chats{also}",
    )


def server_kind(address: Address, models: Sequence[ListedModel] | None) -> str:
    """Return the kind of server, as in ListedModel; "" if unknown."""
    kinds = {model.server for model in models or ()}
    return _HOSTS.get(address.host) or (kinds.pop() if len(kinds) == 1 else "")


def quote_names(models: Sequence[ListedModel]) -> str:
    names = [one_line(model.name, 60) for model in models]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
