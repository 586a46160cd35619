"""The slash commands of the chat. Importing this registers them, in the order in which they are listed."""

from chatterm.commands.registry import COMMANDS
from chatterm.screens.chat.commands import answers, messages, sessions, settings, tools, views

__all__ = ["COMMANDS", "answers", "messages", "sessions", "settings", "tools", "views"]
