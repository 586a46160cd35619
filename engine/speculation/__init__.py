"""Guesses of what comes next in an answer, and how many of them pay. What is guessed never changes a token."""
