"""/set: a conversation's sampling settings, which override the settings file, and that the model's recommendations."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

from chatterm.backends.backend import EngineError, ModelInfo
from chatterm.backends.base import OURS
from chatterm.settings.reading import problem_with
from chatterm.settings.settings import SamplingSettings
from chatterm.terminal.sanitize import one_line

NAMES = tuple(part.name for part in fields(SamplingSettings))
_BACK = ("default", "none")
_OFFERED = {
    "temperature": ("0", "0.3", "0.7", "1"),
    "top_k": ("0", "20", "40"),
    "top_p": ("0.8", "0.95", "1"),
    "min_p": ("0", "0.05", "0.1"),
    "repetition_penalty": ("1", "1.1"),
    "presence_penalty": ("0", "0.5", "1.5"),
    "frequency_penalty": ("0", "0.2", "0.5"),
    "max_tokens": ("256", "1024", "4096"),
    "seed": ("0", "42"),
    "stop_repetition": ("on", "off"),
    "speculation": ("auto", "off", "suffix", "draft"),
}
"""Values that completion offers; any other can be typed."""


@dataclass(frozen=True, slots=True)
class InForce:
    """The present value of one sampling setting; None if it is not set, or known only to the server."""

    name: str
    value: Any
    source: str
    """Origin: "this conversation", "settings file", "the model", "chatterm", "the server's default"; "" if not set."""

    @property
    def text(self) -> str:
        return value_text(self.value)


def in_force(
    chosen: Mapping[str, Any], settings: SamplingSettings, info: ModelInfo | None
) -> dict[str, InForce]:
    """Return the value of every sampling setting, by name, and where it comes from.

    Without `info`, the recommendations of the model's authors are unknown and left out. For a remote model, only
    what the user chose counts, because nothing else is sent to the server.
    """
    from engine.params import UNRECOMMENDED, SamplingParams

    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("this conversation", chosen),
        ("settings file", settings.given()),
    ]
    rest: tuple[str, Mapping[str, Any]] = ("", {})
    if info is not None and info.is_remote:
        layers.append(("", dict.fromkeys(OURS)))  # these are for our own engine
        rest = ("the server's default", {})
    elif info is not None:
        ours = {**({} if info.sampling else UNRECOMMENDED), **OURS}
        layers += [("the model", info.sampling), ("chatterm", ours)]
        rest = ("", asdict(SamplingParams()))
    found = {}
    for name in NAMES:
        source, layer = next((layer for layer in layers if name in layer[1]), rest)
        found[name] = InForce(name, layer.get(name), source)
    return found


def with_choice(chosen: Mapping[str, Any], text: str) -> tuple[str, dict[str, Any]]:
    """Return the name in `NAME VALUE` and the choices with it applied; "" and {} for `default` alone.

    Raises EngineError (one line) if there is no such setting, or it cannot have this value.
    """
    if text.strip().lower() in _BACK:
        return "", {}
    name, value = split(text)
    if value.lower() in _BACK:
        return name, {key: old for key, old in chosen.items() if key != name}
    from chatterm.settings.text import parsed

    try:
        words = shlex.split(value) if name == "stop" else [value]
    except ValueError:
        raise EngineError(
            "A quotation mark is not closed; write it like this: /set stop 'one' 'two'."
        ) from None
    setting = parsed("sampling", name, words)
    if problem := problem_with("sampling", name, setting):
        raise EngineError(problem)
    return name, {**chosen, name: setting}


def is_choice(text: str) -> bool:
    """Return whether `NAME VALUE` is valid as written."""
    try:
        return bool(text.strip().lower() in _BACK or (split(text)[1] and with_choice({}, text)))
    except EngineError:
        return False


def split(text: str) -> tuple[str, str]:
    """Split `NAME VALUE` or `NAME=VALUE`; the value may be missing (""). Raises EngineError for an unknown name."""
    written, *rest = re.split(r"\s*=\s*|\s+", text.strip(), maxsplit=1)
    name = written.lower().lstrip("-").replace("-", "_")
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(NAMES)}."
        raise EngineError(f"Unknown sampling setting {one_line(written, 60)}; {hint}")
    return name, rest[0] if rest else ""


def value_text(value: object) -> str:
    """Return a value as the user reads it."""
    if value in (None, (), []):
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(repr(one_line(str(item), 60)) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def changed_text(name: str, now: InForce | None) -> str:
    """Describe a change: setting `name` was set or reset, and is `now` this; None: all settings were reset."""
    if now is None:
        return "This conversation uses the default sampling settings again, from the next answer on."
    if now.source == "this conversation":
        return f"{name} is {now.text} from the next answer on."
    if now.value in (None, ()):
        if now.source:
            return f"{name} is {now.source} from the next answer on."
        return f"{name} is no longer set, from the next answer on."
    where = {"settings file": "from the settings file", "the model": "as the model's authors recommend"}.get(
        now.source, "the default"
    )
    return f"{name} is {now.text} again ({where}), from the next answer on."


def described_text(now: InForce) -> str:
    """Describe one setting in a line."""
    from chatterm.settings.text import field_docs

    value = f"{now.text} ({now.source or 'default'})"
    if now.value in (None, ()):
        value = now.source or "not set"
    return f"{now.name}: {value}. {field_docs(SamplingSettings)[now.name]}"


def answer_to(
    text: str, chosen: Mapping[str, Any], settings: SamplingSettings, info: ModelInfo | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the choices after `/set text` (None: unchanged) and the reply. Raises EngineError (one line).

    The reply is one line, or for "" a list of all settings.
    """
    if not text:
        found = in_force(chosen, settings, info).values()
        return None, [f"{s.name}: {s.text}" + (f" ({s.source})" if s.source else "") for s in found]
    if text.lower() not in _BACK:
        name, value = split(text)
        if not value:
            return None, [described_text(in_force(chosen, settings, info)[name])]
    name, changed = with_choice(chosen, text)
    return changed, [changed_text(name, in_force(changed, settings, info).get(name))]


def suggested() -> list[str]:
    """Return completions of the argument of /set."""
    return [
        *(f"{name} " for name in NAMES),
        *(f"{name} {value}" for name in NAMES for value in (*_OFFERED.get(name, ()), "default")),
        "default",
    ]
