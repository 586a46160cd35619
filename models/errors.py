"""The errors of models/ that a person can cause."""


class ModelError(Exception):
    """A model that cannot be found, fetched, read or run.

    The message is one line: what was wrong, then what to do next.
    """
