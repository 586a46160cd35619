"""Checks for requests that no engine can compute, however long they wait."""

from engine.cache.rows import Rows
from engine.errors import ContextFullError, EngineError
from models.units import counted


def check_rows(rows: Rows, spare: int, vocab_size: int, context_length: int) -> None:
    """Raise EngineError for an unknown token id, ContextFullError if `rows` and `spare` more do not fit."""
    if rows and not 0 <= min(rows.token_ids) <= max(rows.token_ids) < vocab_size:
        unknown = [id for id in rows.token_ids if not 0 <= id < vocab_size]
        raise EngineError(f"There is no token {unknown[0]}; this model has tokens 0 to {vocab_size - 1}.")
    if len(rows) + spare > context_length:
        over = len(rows) + spare - context_length
        raise ContextFullError(
            f"The prompt is {counted(over, 'token')} too long for the context of {context_length:,}; "
            "shorten it or start with a larger --context.",
            needed=len(rows) + spare,
            available=context_length,
        )
