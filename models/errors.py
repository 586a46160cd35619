"""The errors of models/ that a person can cause."""


class ModelError(Exception):
    """A model that cannot be found, fetched, read or run.

    The message is one line: what was wrong, then what to do next. Line breaks in it, which a name in a damaged file
    may hold, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class NoRoomError(Exception):
    """Of an error: memory does not suffice now. Where other models give some back, it may."""


class TooLargeError(ModelError, NoRoomError):
    """There is too little memory for the weights of a model."""
