"""Slash commands: their registry, their actions, their output."""
