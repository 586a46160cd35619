"""Slash commands: the one registry, what a command may do, what it says."""
