"""Guesses of the next tokens of an answer, and how many of them pay. A guess never changes which token is drawn."""
