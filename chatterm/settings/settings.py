"""The settings: one frozen tree.

Each field is documented by the string that follows it; `chatterm config` prints these.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from chatterm.backends.backend import ChatOptions, EngineError, ThinkCache, ThinkMode
from chatterm.backends.remote.address import Remote
from chatterm.terminal.title import Notify

Panel = Literal["auto", "show", "hide"]
Glyphs = Literal["auto", "unicode", "ascii"]
WhenFull = Literal["ask", "summarise", "stop"]
ThinkDisplay = Literal["live", "open", "closed"]


class SettingsError(EngineError):
    """The settings file cannot be used. The message names the file and line, and says how to correct it."""


@dataclass(frozen=True, slots=True)
class ScreenSettings:
    """How the chat looks."""

    theme: str = "auto"
    """The colour theme; auto is dark or light as the terminal is. `/theme` shows all; put your own in the folder
    `themes` next to this file."""
    panel: Panel = "auto"
    """The stats panel beside the conversation; auto shows it if the terminal is wide enough."""
    thinking: ThinkDisplay = "live"
    """The thinking of a reasoning model: shown live and then collapsed to one line, always open, or always closed."""
    tint: bool = False
    """Tint the parts of this run's answers that speculation guessed right: they took no step of their own."""
    glyphs: Glyphs = "auto"
    """Draw lines and bars in Unicode or in plain ASCII; auto goes by the locale and the terminal."""
    notify: Notify = "bell"
    """When a long answer ends while you are in another window: ring the terminal's bell, show a desktop
    notification (or ring, if the terminal cannot show one), or do nothing."""

    @property
    def panel_wanted(self) -> bool | None:
        """Whether to show the panel; None: if there is room."""
        return {"auto": None, "show": True, "hide": False}[self.panel]

    @property
    def thinking_open(self) -> bool | None:
        """Whether to show the thinking open; None: while it runs."""
        return {"live": None, "open": True, "closed": False}[self.thinking]


FORMER_NAMES = {"spill_gb": "offload_gb"}
"""The present names of settings by their former ones, which files may still use."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model answers, and where."""

    name: str | None = None
    """The model that `chatterm run` uses when none is given."""
    system: str | None = None
    """The system prompt for new conversations."""
    context: int | None = None
    """The context size: maximum tokens in a conversation; not set: what the model and the memory allow."""
    draft: str | None = None
    """A small model of the same family that guesses what comes next; "auto": the catalogue's, if it is on this machine.
    The text stays the same."""
    device: Literal["auto", "cpu", "cuda"] | str = "auto"
    """Where the model runs; one GPU of several is named by its number, as in "cuda:1"."""
    threads: int | None = None
    """CPU threads; not set: all physical cores, minus one for the screen if there are more than two."""
    tensor_parallel: int = 1
    """GPUs of this machine that compute every layer together; 0: as few as have room for the model."""
    think: ThinkMode = "auto"
    """Whether a reasoning model thinks before it answers; auto leaves it to the model."""
    offload_gb: float | None = None
    """At most this many GB of pinned host memory for what a GPU's KV cache evicts; 0: none; not set: a quarter of
    the free memory, but no more than four times the cache."""
    keep_alive: str | None = None
    """Keep the model loaded for the next `chatterm run`, in a process of its own, until it has not been used for this
    long, as in "30m"; "forever": until `chatterm stop`; not set: it is freed with the chat."""
    think_cache: ThinkCache = "exact"
    """After thinking: recompute the answer without it (exact), or keep both cached and hide the thinking (mask)."""
    tune: bool = True
    """On a GPU: measure once, in idle time, how its kernels run fastest, and use the result from the next
    start on; false uses the built-in choices."""


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
    frequency_penalty: float | None = None
    """Above 0 discourages tokens by how often they are in the answer."""
    max_tokens: int | None = None
    """The maximum length of an answer, in tokens."""
    seed: int | None = None
    """The same seed gives the same text for the same conversation."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer when they are generated."""
    stop_repetition: bool | None = None
    """Stop an answer that repeats itself without end; /continue goes on with it. On by default where the model runs
    here, except for answers in a format (--json-schema and others)."""
    speculation: Literal["auto", "off", "suffix", "draft"] | None = None
    """Guess what comes next, and check several tokens at once; the text stays the same. suffix: from what was said
    before; draft: by the draft model (see model.draft); auto: by both, as many as seem to pay, which is the default
    where the model runs here."""

    def given(self) -> dict[str, Any]:
        """Return the values that are set, as arguments of SamplingParams."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}


@dataclass(frozen=True, slots=True)
class ComposerSettings:
    """The composer, where you write."""

    history: int = 1000
    """How many sent messages Up and Down can recall; 0 keeps none."""
    vim: bool = False
    """Vim's keys: Esc leaves insert mode; from the next start on."""
    prepare_drafts: bool = True
    """Prewarm the message while you type, so that the answer starts at once."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The conversation."""

    when_full: WhenFull = "ask"
    """When the context is nearly full: ask how to make room, or have the model write a summary of the oldest
    messages for you to read, or only say so (stop)."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Saved conversations."""

    save: bool = True
    """Save conversations on this machine as they happen; false keeps them in memory only."""
    guesses: bool = True
    """Guess what comes next from earlier sessions with the same model, too (see sampling.speculation); false looks at
    the conversations of this run only."""
    titles: bool = True
    """Let the model write the title of a conversation while it is idle, if it is large enough for
    that; false uses the first words."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache on disk."""

    disk_gb: float | None = None
    """At most this many GB of disk for the KV cache of saved conversations, so that they continue at once after a
    restart; 0: none; not set: a tenth of the free space, but no more than 20."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. One field is one table of the file."""

    screen: ScreenSettings = field(default_factory=ScreenSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    composer: ComposerSettings = field(default_factory=ComposerSettings)
    chat: ChatSettings = field(default_factory=ChatSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    remotes: Mapping[str, Remote] = field(default_factory=dict)
    """Servers by name: the tables [remotes.NAME]."""


TABLES = {name: kind for name, kind in get_type_hints(Settings).items() if name != "remotes"}
"""The tables with a fixed set of settings, by name."""


def with_settings(options: ChatOptions, settings: Settings, chosen: Collection[str]) -> ChatOptions:
    """Return `options` with the settings for all fields but those `chosen` by the command line or the session.

    Sampling values in `options` take precedence over the settings.
    """
    names = {part.name for part in fields(ModelSettings)} & {part.name for part in fields(ChatOptions)}
    wanted: dict[str, Any] = {name: getattr(settings.model, name) for name in names}
    wanted["draft"] = None if settings.model.draft == "none" else settings.model.draft
    wanted["disk_gb"] = settings.cache.disk_gb
    fresh = {name: value for name, value in wanted.items() if name not in chosen}
    return replace(options, **fresh, sampling={**settings.sampling.given(), **options.sampling})
