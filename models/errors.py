"""The errors of models/ that a user can cause."""

import re


class ModelError(Exception):
    """A model that cannot be found, fetched, read or run.

    The message is one line: what was wrong, then what to do next. Line breaks, which a name in a damaged file may
    contain, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class NoRoomError(Exception):
    """A mix-in for errors: there is too little memory now, but there may be enough once other models release some.

    The message names the memory that is needed and that is free, and then, after a semicolon or a full stop, a remedy.
    """

    @property
    def sizes(self) -> str:
        """The part of the message that names the sizes."""
        return re.split(r"[;.](?= |$)", str(self), maxsplit=1)[0]


class TooLargeError(ModelError, NoRoomError):
    """There is too little memory for the weights of a model."""


def faulty(what: str, how: str = "damaged") -> ModelError:
    """Return the error for a checkpoint that is damaged, incomplete or inconsistent, in one line."""
    return ModelError(f"{what}; the checkpoint is {how}: download it again.")
