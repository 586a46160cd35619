"""The settings of a conversation, which do not depend on its messages."""

from typing import Literal

from engine.conversation.history import History, ThinkCache
from engine.conversation.prompt import PromptFormat
from engine.conversation.tools import ToolUse
from engine.core import EngineCore
from engine.errors import EngineError

Think = Literal["auto", "on", "off"]


class ChatSettings:
    """The settings of a `Chat`; they apply from the next message on."""

    def __init__(self, engine: EngineCore, system: str | None, think: Think, think_cache: ThinkCache) -> None:
        """Store the settings. Raises EngineError if the model cannot chat or an argument has an unknown value."""
        self._engine = engine
        self._format = PromptFormat(engine.tokenizer)
        self.thinks = self._format.thinks()
        self._history = History(engine, self._format, system, think_cache)
        self.think = think
        self.think_cache = think_cache

    @property
    def think(self) -> Think:
        """Whether to think, from the next answer on. Setting it raises EngineError for an unknown value."""
        return self._think

    @think.setter
    def think(self, think: Think) -> None:
        if think not in ("auto", "on", "off"):
            raise EngineError(f"think is {think!r}; it must be auto, on or off.")
        self._think: Think = think
        self._history.think = self._thinking

    @property
    def think_cache(self) -> ThinkCache:
        """The policy for think spans in the history. Setting it raises EngineError for an unknown value."""
        return self._history.policy

    @think_cache.setter
    def think_cache(self, think_cache: ThinkCache) -> None:
        if think_cache not in ("exact", "mask"):
            raise EngineError(f"think_cache is {think_cache!r}; it must be exact or mask.")
        self._history.policy = think_cache

    @property
    def system(self) -> str | None:
        """The system prompt; it applies from the next message on."""
        return self._history.system

    @system.setter
    def system(self, system: str | None) -> None:
        self._history.system = system

    def begun_with(self, system: str | None) -> list[int]:
        """Return the tokens with which every conversation with this system prompt begins."""
        return self._history.begun_with(system).token_ids

    @property
    def tools(self) -> ToolUse | None:
        """What the model knows of tools; it applies from the next message on."""
        return self._history.tools

    @tools.setter
    def tools(self, tools: ToolUse | None) -> None:
        self._history.tools = tools

    @property
    def _thinking(self) -> bool | None:
        return {"auto": None, "on": True, "off": False}[self.think]
