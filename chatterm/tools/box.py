"""The tools of one session: which exist, which are on, and the plan of a call."""

from collections.abc import Iterable

from chatterm.backends.backend import EngineError, Tool, ToolCall
from chatterm.terminal.sanitize import one_line
from chatterm.tools.arguments import parsed
from chatterm.tools.tool import Planner, ToolError, ToolPlan
from models.units import counted

GROUPS = {
    "read": ("read_file", "list_folder"),
    "search": ("search",),
    "write": ("write_file", "patch_file"),
    "run": ("run_command",),
    "fetch": ("fetch_url",),
}
"""Groups of tools that one word switches on."""


def tool_words(text: str) -> list[str]:
    """Return the names in the text of `/tools TEXT`."""
    return [word for word in text.replace(",", " ").split() if word not in ("on", "off")]


class ToolRegistry:
    """The tools of a session, all of which are off until a person switches them on."""

    def __init__(self, planners: Iterable[Planner] = ()) -> None:
        self._planners = {planner.tool.name: planner for planner in planners}
        self.on: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._planners)

    @property
    def known(self) -> set[str]:
        """Words that name something here: groups, tools, and servers whose tools are registered."""
        return {
            "all",
            *GROUPS,
            *self._planners,
            *(name.split("__")[0] for name in self._planners if "__" in name),
        }

    def offered(self) -> tuple[Tool, ...]:
        """Return the tools that are on, which are the ones the model is told of."""
        return tuple(planner.tool for name, planner in self._planners.items() if name in self.on)

    def planner(self, name: str) -> Planner:
        """Return the planner of a registered tool. A KeyError is a bug of the caller."""
        return self._planners[name]

    def put(self, planners: Iterable[Planner]) -> None:
        """Add tools, which are off."""
        self._planners |= {planner.tool.name: planner for planner in planners}

    def found(self, word: str) -> list[str]:
        """Return the tools that a word names: one, a group, or all of a server (`server:`). Raises EngineError."""
        if word == "all":
            return self.names
        names = [name for name in GROUPS.get(word, (word,)) if name in self._planners]
        names = names or [name for name in self.names if name.startswith(f"{word.rstrip(':')}__")]
        if not names and word in GROUPS:
            raise EngineError(
                f"The tools of {word} do not exist on Windows: they rely on POSIX to keep to one folder."
            )
        if not names:
            known = ", ".join([*GROUPS, *(name for name in self.names if "__" in name)])
            raise EngineError(f"There is no tool {one_line(word, 40)!r}; the tools are: {known}, all.")
        return names

    def said(self) -> tuple[str, ...]:
        """Return the shortest list of words that names exactly the tools that are on."""
        left, words = set(self.on), list[str]()
        for word in (*GROUPS, *sorted({name.split("__")[0] for name in left if "__" in name})):
            names = {
                name for name in self.names if name in GROUPS.get(word, ()) or name.startswith(f"{word}__")
            }
            if names and names <= left:
                words.append(word)
                left -= names
        return (*words, *(name for name in self.names if name in left))

    def switch(self, text: str) -> str:
        """Do what `/tools TEXT` asks for and return a sentence about what is on now. Raises EngineError."""
        way = text.split()[0]
        words = tool_words(text)
        if way == "off":
            self.on -= {name for word in words or ["all"] for name in self.found(word)}
        else:
            names = {name for word in words or ["read", "search"] for name in self.found(word)}
            self.on = self.on | names if way == "on" else names
        whole = [word for word in self.said() if word not in (*GROUPS, *self.names)]
        servers = {word: [name for name in self.names if name.startswith(f"{word}__")] for word in whole}
        taken = {name for names in servers.values() for name in names}
        shown = [name for name in self.names if name in self.on - taken]
        shown += [f"{word} ({counted(len(names), 'tool')})" for word, names in servers.items()]
        on = ", ".join(shown)
        return (
            f"The model may ask to use: {on}. You are asked before each call." if on else "All tools are off."
        )

    def plan(self, call: ToolCall) -> ToolPlan:
        """Plan a call without running it. Raises ToolError if its tool is off or its arguments are invalid."""
        planner = self._planners.get(call.name)
        if planner is None or call.name not in self.on:
            raise ToolError(
                f"There is no tool {one_line(call.name, 60)!r}; the tools are: {', '.join(sorted(self.on)) or 'none'}."
            )
        return planner.plan(parsed(call.arguments))
