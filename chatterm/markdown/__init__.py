"""Markdown laid out as styled lines of terminal cells: pure functions, no widget."""
