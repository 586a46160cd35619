"""What goes wrong while something is computed, for people."""

from engine.errors import EngineError
from models.errors import ModelError
from models.load import is_out_of_memory


def explain(error: Exception, remedy: str = "Try again.") -> EngineError:
    """One line for people. The conversation is intact: the step was not noted, its blocks are given back."""
    if is_out_of_memory(error):
        return EngineError(
            "Out of memory; the conversation is intact. Close other programs, or start with a smaller --context."
        )
    if isinstance(error, EngineError):
        return error
    if isinstance(error, ModelError):
        return EngineError(str(error))
    text = (str(error).splitlines() or [""])[0] if isinstance(error, RuntimeError) else repr(error)
    return EngineError(f"The computation failed ({text[:200]}); the conversation is intact. {remedy}")
