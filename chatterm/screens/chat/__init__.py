"""The chat screen, one concern a file."""
