"""What keeps something from being attached, in one line each."""

from chatterm.backends.backend import EngineError


class AttachmentError(EngineError):
    """A file that cannot be attached."""


class NoFileError(AttachmentError):
    """Something that looks like a file and is none. It can be sent as text."""


class NeedsYesError(AttachmentError):
    """Something that is attached only once the person has seen this and said yes."""
