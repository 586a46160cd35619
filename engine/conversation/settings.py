"""What is chosen for a conversation, whatever is said in it."""

from typing import Literal

from engine.conversation.history import History, ThinkCache
from engine.conversation.prompt import PromptFormat
from engine.conversation.tools import ToolUse
from engine.core import EngineCore
from engine.errors import EngineError

Think = Literal["auto", "on", "off"]


class ChatSettings:
    """The part of a Chat that is set; the next message obeys."""

    def __init__(self, engine: EngineCore, system: str | None, think: Think, think_cache: ThinkCache) -> None:
        """Raises EngineError when the model cannot chat or an argument is none of its values."""
        self._engine = engine
        self._format = PromptFormat(engine.tokenizer)
        self.thinks = self._format.thinks()
        self.think = think
        self._history = History(engine, self._format, system, think_cache)
        self.think_cache = think_cache

    @property
    def think(self) -> Think:
        """Whether to think; the next answer obeys. Setting it raises EngineError for any other value."""
        return self._think

    @think.setter
    def think(self, think: Think) -> None:
        if think not in ("auto", "on", "off"):
            raise EngineError(f"think is {think!r}; it must be auto, on or off.")
        self._think: Think = think

    @property
    def think_cache(self) -> ThinkCache:
        """What becomes of think spans in the history. Setting it raises EngineError for any other value."""
        return self._history.policy

    @think_cache.setter
    def think_cache(self, think_cache: ThinkCache) -> None:
        if think_cache not in ("exact", "mask"):
            raise EngineError(f"think_cache is {think_cache!r}; it must be exact or mask.")
        self._history.policy = think_cache

    @property
    def system(self) -> str | None:
        """The system prompt; the next message obeys."""
        return self._history.system

    @system.setter
    def system(self, system: str | None) -> None:
        self._history.system = system

    def begun_with(self, system: str | None) -> list[int]:
        """The tokens that every conversation with this system prompt begins with, whatever is said."""
        return self._history.begun_with(system).token_ids

    @property
    def tools(self) -> ToolUse | None:
        """What the model knows of tools; the next message obeys."""
        return self._history.tools

    @tools.setter
    def tools(self, tools: ToolUse | None) -> None:
        self._history.tools = tools

    @property
    def _thinking(self) -> bool | None:
        return {"auto": None, "on": True, "off": False}[self.think]
