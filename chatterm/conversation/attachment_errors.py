"""Errors that keep something from being attached, in one line each."""

from chatterm.backends.backend import EngineError


class AttachmentError(EngineError):
    """A file that cannot be attached."""


class NoFileError(AttachmentError):
    """A mention that looks like a file but names none. It can be sent as text."""


class NeedsYesError(AttachmentError):
    """An attachment that is made only once the user has read this message and agreed."""
