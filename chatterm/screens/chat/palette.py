"""The command palette, and the slash commands in it."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

from textual import on
from textual.command import CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher
from textual.markup import escape
from textual.widgets import Input

from chatterm.commands.registry import Command, all_commands
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.chat.screen import ChatScreen


class Palette(Backdrop, CommandPalette):
    """Textual's palette, made to fit into a low window and to respect what was typed, however fast."""

    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012 (Textual declares it so)

    def update_node_styles(self, animate: bool = True) -> None:
        """Apply the styles in another turn of the event loop than the one that fills the list."""
        self.call_later(_alone, partial(super().update_node_styles, animate))

    def _watch__list_visible(self) -> None:
        """Show or hide the list in another turn, too, and its border in yet another one."""
        for selector, name in (("CommandList", "--visible"), ("#--input", "--list-visible")):
            self.call_later(_alone, partial(self._mark, selector, name))
        if not self._list_visible:
            self._show_busy = False

    def _mark(self, selector: str, name: str) -> None:
        self.query(selector).set_class(self._list_visible, name)

    def _action_command_list(self, action: str) -> None:
        """Move in the list only while it has rows on the screen: without any, Textual fails."""
        if action == "select" or self.query_one(CommandList).scrollable_content_region:
            super()._action_command_list(action)

    @on(Input.Submitted)
    async def _choose(self, event: Input.Submitted) -> None:
        """Wait until the list matches the typed text, since Enter may come earlier, then choose."""
        event.stop()
        event.prevent_default()
        searches = [
            each
            for each in self.workers
            if each.group == self._GATHER_COMMANDS_GROUP and not each.is_finished
        ]
        if searches:
            await self.workers.wait_for_complete(searches)
        self._select_or_command()


async def _alone(work: Callable[[], None]) -> None:
    """Do `work`, then give others their turn: what is called later may all come in one turn of the event loop."""
    work()
    await asyncio.sleep(0)


class SlashCommands(Provider):
    """Choosing a command runs it; one that wants an argument is written into the composer instead."""

    async def discover(self) -> Hits:
        for command in all_commands():
            usage = Content(command.usage)
            yield DiscoveryHit(usage, self._chosen(command), command.usage, _help(command))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in all_commands():
            is_named = query.strip().removeprefix("/").lower() in (command.name, *command.aliases)
            score = inf if is_named else max(matcher.match(command.usage), matcher.match(command.help))
            if score > 0:
                shown = _highlighted(matcher, command.usage)
                yield Hit(score, shown, self._chosen(command), command.usage, _help(command))

    def _chosen(self, command: Command) -> "partial[None]":
        screen = self.screen
        assert isinstance(screen, ChatScreen)
        return partial(screen.choose, command, command.default)


def _highlighted(matcher: Matcher, usage: str) -> Content:
    """Return `usage` with what matches highlighted. The matcher itself would take "[N]" for markup and leave it out."""
    content = Content(usage)
    for offset in matcher.fuzzy_search.match(matcher.query, usage)[1]:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content


def _help(command: Command) -> str:
    """Return the help of a command as markup."""
    return escape(f"{command.help}  ({command.key})" if command.keys else command.help)
