"""The errors of models/ that a user can cause."""


class ModelError(Exception):
    """A model that cannot be found, fetched, read or run.

    The message is one line: what was wrong, then what to do next. Line breaks, which a name in a damaged file may
    contain, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class NoRoomError(Exception):
    """Mixed into an error: there is too little memory now, but there may be enough once other models release some."""


class TooLargeError(ModelError, NoRoomError):
    """There is too little memory for the weights of a model."""
