"""Choices made by measuring on this machine: the search, and the file that keeps its results."""
