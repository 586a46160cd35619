"""The models that can be chosen on servers: those on usual ports of this machine, and the remotes in the settings."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from chatterm.backends.backend import EngineError, ModelChoice
from chatterm.backends.remote.address import Address, Remote, found
from chatterm.backends.remote.client import Client
from chatterm.backends.remote.keys import find_key
from chatterm.backends.remote.model_lookup import choose_dialect, list_models
from chatterm.terminal.sanitize import one_line

USUAL: Mapping[int, tuple[str, str]] = {
    11434: ("Ollama", "ollama"),
    1234: ("LM Studio", "openai"),
    8000: ("vLLM", "openai"),
    8080: ("llama-server", "openai"),
    8642: ("chatterm", "openai"),
    30000: ("SGLang", "openai"),
}
"""Ports of this machine on which servers usually listen, with the name and the address scheme of each server."""
_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama-server",
    "chatterm": "chatterm",
    "ollama": "Ollama",
}
_NEAR, _FAR = 0.8, 4.0
"""Time limits in seconds for a server on this machine, and for one elsewhere."""
_MOST = 500
"""Most models shown for one server."""


def local_choices(usual: Mapping[int, tuple[str, str]] = USUAL) -> list[ModelChoice]:
    """Return the models of servers on this machine. Blocks for at most a second; no key is sent."""
    asked = [(name, found(f"{scheme}://localhost:{port}", {})) for port, (name, scheme) in usual.items()]
    return _all([partial(_near, name, address) for name, address in asked if address is not None])


def named_choices(remotes: Mapping[str, Remote]) -> list[ModelChoice]:
    """Return the models of the remotes in the settings; for a remote that does not answer, its configured model.

    Blocks for at most some seconds; no command is run for a key.
    """
    return _all([partial(_named, name, remotes) for name in remotes])


def choices_beside(model: str) -> list[ModelChoice]:
    """Return the models of the server of `model`, an address; `model` is always among them. Blocks as
    `named_choices`.
    """
    address = found(model, {})
    if address is None:
        return []
    name = one_line(address.host, 100)
    alone = [ModelChoice(model, None, False, None, server=name, label=address.model)]
    try:
        there = _asked(address, find_key(address), _NEAR if address.is_local else _FAR, name)
    except EngineError:
        return alone
    return there if any(choice.name == model for choice in there) else [*alone, *there]


def _all(looks: Sequence[Callable[[], list[ModelChoice]]]) -> list[ModelChoice]:
    if not looks:
        return []
    with ThreadPoolExecutor(len(looks), "chatterm-look") as pool:
        return [choice for future in [pool.submit(look) for look in looks] for choice in future.result()]


def _near(name: str, address: Address) -> list[ModelChoice]:
    try:
        return _asked(address, None, _NEAR, name)
    except EngineError:  # most ports have nothing, or something else
        return []


def _named(name: str, remotes: Mapping[str, Remote]) -> list[ModelChoice]:
    remote = remotes[name]
    alone = [ModelChoice(name, None, False, None, server=name, label=remote.model or name)]
    try:
        address = found(name, remotes)
        if address is None or remote.key_command is not None:
            return alone
        there = _asked(address, find_key(address), _FAR, name)
    except EngineError:
        return alone
    return there or alone


def _asked(address: Address, key: str | None, seconds: float, name: str) -> list[ModelChoice]:
    client = Client(address, key)
    try:
        models = list_models(client, choose_dialect(address.api), key is not None, seconds=seconds) or []
    finally:
        client.close()
    choices = []
    for model in models[:_MOST]:
        label = model.name.removesuffix(":latest") if address.api == "ollama" else model.name
        if label != one_line(label, 300):  # a name that cannot be shown as it is cannot be asked for either
            continue
        whole = replace(address, model=label).name
        kind = _NAMES.get(model.server, name)
        is_whole = "://" not in address.prefix or kind == address.host
        server = name if is_whole else f"{kind} {address.host}"
        choices.append(
            ModelChoice(whole, None, False, None, server=server, label=label, context=model.context_length)
        )
    return choices
