"""The settings: one frozen tree, read from one TOML file. Nothing in the file is ever executed.

Each field is documented by the string that follows it; `chatterm config` prints these.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from chatterm.backends.backend import ChatOptions, EngineError, ThinkCache, ThinkMode
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.title import Notify

Panel = Literal["auto", "show", "hide"]
Glyphs = Literal["auto", "unicode", "ascii"]
ThinkDisplay = Literal["live", "open", "closed"]


class SettingsError(EngineError):
    """The settings file cannot be used. The message names file and line, and says what would be right."""


@dataclass(frozen=True, slots=True)
class ScreenSettings:
    """How the chat looks."""

    theme: str = "graphite"
    """The colour theme. `/theme` shows all; put your own in the folder `themes` next to this file."""
    panel: Panel = "auto"
    """The stats panel beside the conversation; auto shows it if the terminal is wide enough."""
    thinking: ThinkDisplay = "live"
    """The thinking of a reasoning model: shown live and then collapsed to one line, always open, or always closed."""
    glyphs: Glyphs = "auto"
    """Draw lines and bars in Unicode or in plain ASCII; auto goes by the locale and the terminal."""
    notify: Notify = "bell"
    """When a long answer ends while you are in another window: ring the terminal's bell, show a desktop
    notification (or ring, if the terminal cannot show one), or do nothing."""

    @property
    def panel_wanted(self) -> bool | None:
        """None: where there is room."""
        return {"auto": None, "show": True, "hide": False}[self.panel]

    @property
    def thinking_open(self) -> bool | None:
        """None: while it runs."""
        return {"live": None, "open": True, "closed": False}[self.thinking]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model answers, and where."""

    name: str | None = None
    """The model that `chatterm run` uses when none is given."""
    system: str | None = None
    """The system prompt for new conversations."""
    context: int | None = None
    """The context size: maximum tokens in a conversation; not set: what the model and the memory allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads; not set: all physical cores, minus one for the screen if there are more than two."""
    think: ThinkMode = "auto"
    """Whether a reasoning model thinks before it answers; auto leaves it to the model."""
    spill_gb: float | None = None
    """At most this many GB of pinned host memory for what a GPU's KV cache evicts; 0: none; not set: a quarter of
    the free memory, but no more than four times the cache."""
    think_cache: ThinkCache = "exact"
    """After thinking: recompute the answer without it (exact), or keep both cached and hide the thinking (mask)."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen. What is not set uses the model's own default."""

    temperature: float | None = None
    """0 always picks the most likely token; higher values vary more."""
    top_k: int | None = None
    """Sample from the k most likely tokens; 0 means all."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities add up to p."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the top one."""
    repetition_penalty: float | None = None
    """Above 1 discourages repeating earlier tokens."""
    presence_penalty: float | None = None
    """Above 0 discourages tokens already in the answer."""
    max_tokens: int | None = None
    """The maximum length of an answer, in tokens."""
    seed: int | None = None
    """The same seed gives the same text for the same conversation."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer when they are generated."""

    def given(self) -> dict[str, Any]:
        """What is set, as arguments of SamplingParams."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}


@dataclass(frozen=True, slots=True)
class ComposerSettings:
    """The composer, where you write."""

    history: int = 1000
    """How many sent messages Up and Down can recall; 0 keeps none."""
    prepare_drafts: bool = True
    """Prewarm the message while you type, so that the answer starts at once."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Saved conversations."""

    save: bool = True
    """Save conversations on this machine as they happen; false keeps them in memory only."""
    titles: bool = True
    """Let the model write the title of a conversation while it is idle, if it is large enough for
    that; false uses the first words."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. One field is one table of the file."""

    screen: ScreenSettings = field(default_factory=ScreenSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    composer: ComposerSettings = field(default_factory=ComposerSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)

    @classmethod
    def load(cls, path: Path) -> "Settings":
        """What the file says; every default where there is none. Raises SettingsError."""
        return parse_settings(read_source(path), path)


def with_settings(options: ChatOptions, settings: Settings, chosen: Collection[str]) -> ChatOptions:
    """`options` with the settings for everything that is not `chosen` already: names of fields that the command line
    or the session decided. Of the sampling, what `options` has goes before the settings."""
    model = settings.model
    wanted: dict[str, Any] = {
        "device": model.device,
        "context": model.context,
        "spill_gb": model.spill_gb,
        "threads": model.threads,
        "system": model.system,
        "think": model.think,
        "think_cache": model.think_cache,
    }
    fresh = {name: value for name, value in wanted.items() if name not in chosen}
    return replace(options, **fresh, sampling={**settings.sampling.given(), **options.sampling})


def read_source(path: Path) -> str:
    """The text of the file, "" where there is none. Raises SettingsError where it cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{path}, line {line}: this is not UTF-8; save the file as UTF-8 text."
        ) from error


def parse_settings(source: str, path: Path) -> Settings:
    """The settings that `source` states; `path` is named where it is wrong. Raises SettingsError."""
    import tomllib

    try:
        tables = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise not_toml(path, source, error) from error
    try:
        return settings_from(tables)
    except _Wrong as wrong:
        from chatterm.settings.file import statement_lines

        first, _ = statement_lines(source, wrong.keys) or (0, 0)
        raise SettingsError(f"{path}, line {first + 1}: {wrong}") from None


def not_toml(path: Path, source: str, error: Exception) -> SettingsError:
    """What to say about a file that tomllib does not accept."""
    text, _, place = one_line(str(error)).rstrip(")").partition(" (at ")
    line = place.split(",")[0] if place.startswith("line ") else f"line {source.rstrip().count(chr(10)) + 1}"
    return SettingsError(f"{path}, {line}: this is not TOML: {text}.")


class _Wrong(Exception):
    """A value of the file is wrong; `keys` is where it stands."""

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


def check(table: str, key: str, value: object) -> None:
    """Raises SettingsError where the setting does not exist or cannot have this value."""
    if problem := problem_with(table, key, value):
        raise SettingsError(f"{table}.{key}: {problem}")


def problem_with(table: str, key: str, value: object) -> str:
    """What is wrong with this value of a setting, as a line that begins with its name; "" where nothing is."""
    try:
        settings_from({table: {key: list(value) if isinstance(value, tuple) else value}})
    except _Wrong as wrong:
        return str(wrong)
    return ""


def settings_from(tables: Mapping[str, Any]) -> Settings:
    """The settings that these tables state. Raises _Wrong."""
    types = get_type_hints(Settings)
    _check_names((), tables, types)
    built = {}
    for table, values in tables.items():
        if not isinstance(values, dict):
            raise _Wrong((table,), f"{table} is a table: write [{table}] and its settings below it.")
        kind = types[table]
        hints = get_type_hints(kind)
        _check_names((table,), values, hints)
        built[table] = kind(**{k: _checked((table, k), v, hints[k]) for k, v in values.items()})
    settings = Settings(**built)
    _check_ranges(settings)
    return settings


def _check_names(where: tuple[str, ...], given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            path = one_line(".".join((*where, name)), limit=80)
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(known)}."
            raise _Wrong((*where, name), f"unknown setting {path}; {hint}")


def _checked(keys: tuple[str, ...], value: object, kind: Any) -> object:
    """`value` as the field wants it."""
    wanted = [part for part in (get_args(kind) if _is_union(kind) else (kind,)) if part is not NoneType]
    for part in wanted:
        if get_origin(part) is Literal and value in get_args(part) and isinstance(value, str):
            return value
        if part is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if get_origin(part) is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        if part in (str, bool, int) and type(value) is part:
            return value
    raise _Wrong(keys, f"{keys[-1]} is {_shown(value)}; it must be {expected(kind)}.")


def expected(kind: Any) -> str:
    """What a field of this type may hold, in words."""
    parts = [part for part in (get_args(kind) if _is_union(kind) else (kind,)) if part is not NoneType]
    if get_origin(parts[0]) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(parts[0]))
    if get_origin(parts[0]) is tuple:
        return 'a list of strings, as in ["one", "two"]'
    return {str: 'text in quotes, as in "text"', bool: "true or false", int: "a whole number"}.get(
        parts[0], "a number"
    )


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return one_line(text, limit=60)


def _check_ranges(settings: Settings) -> None:
    """Values of the right type that make no sense all the same."""
    from engine.params import SamplingParams

    for name, value in settings.sampling.given().items():
        try:
            SamplingParams(**{name: value})
        except EngineError as error:
            raise _Wrong(("sampling", name), one_line(str(error))) from error
    if settings.composer.history < 0:
        raise _Wrong(
            ("composer", "history"), f"history is {settings.composer.history}; it must be 0 or more."
        )
    for name in ("context", "threads"):
        number = getattr(settings.model, name)
        if number is not None and number < 1:
            raise _Wrong(("model", name), f"{name} is {number}; it must be 1 or more.")
    if settings.model.spill_gb is not None and not 0 <= settings.model.spill_gb < inf:
        raise _Wrong(("model", "spill_gb"), f"spill_gb is {settings.model.spill_gb}; it must be 0 or more.")
    if settings.model.name is not None and not settings.model.name.strip():
        raise _Wrong(("model", "name"), 'name is empty; it must name a model, as in "smollm2".')
    from chatterm.settings.themes import theme_names

    if settings.screen.theme not in theme_names():
        known = ", ".join(theme_names())
        theme = one_line(settings.screen.theme, limit=60)
        raise _Wrong(("screen", "theme"), f"unknown theme {theme!r}; choose one of: {known}.")
