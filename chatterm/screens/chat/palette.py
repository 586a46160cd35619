"""The slash commands in the command palette."""

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from chatterm.commands.registry import Command, all_commands
from chatterm.screens.chat.screen import ChatScreen


class SlashCommands(Provider):
    """Choosing a command runs it; one that wants an argument is written into the composer instead."""

    async def discover(self) -> Hits:
        for command in all_commands():
            yield DiscoveryHit(command.usage, self._chosen(command), help=_help(command))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in all_commands():
            score = max(matcher.match(command.usage), matcher.match(command.help))
            if score > 0:
                shown = matcher.highlight(command.usage)
                yield Hit(score, shown, self._chosen(command), command.usage, _help(command))

    def _chosen(self, command: Command) -> "partial[None]":
        screen = self.screen
        assert isinstance(screen, ChatScreen)
        return partial(screen.choose, command, command.default)


def _help(command: Command) -> str:
    return f"{command.help}  ({command.key})" if command.keys else command.help
