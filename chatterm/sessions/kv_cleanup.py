"""Cleanup of the KV cache on disk (`engine/store/`) after sessions and documents were deleted."""

import re
import sqlite3
from contextlib import suppress
from pathlib import Path

from chatterm.sessions.rows import rows
from chatterm.sessions.schema import database_path
from engine.store.folder import chunk_owner_name, default_folder, forget, is_chunk, owners

_SESSION = re.compile(r"[0-9a-f]{8}")


def tidy(connection: sqlite3.Connection, path: Path) -> None:
    """Remove the blocks of deleted sessions and documents: another program may have written some afterwards."""
    if path != database_path():  # the blocks on disk belong to another database
        return
    folder = default_folder()
    with suppress(sqlite3.Error, OSError):
        found = owners(folder)
        known = {id for (id,) in rows(connection, "SELECT id FROM sessions", (), str)} if found else set()
        texts = rows(connection, "SELECT sha256 FROM texts", (), str)
        known |= {chunk_owner_name(sha256) for (sha256,) in texts}
        for owner in found - known:
            if is_chunk(owner) or _SESSION.fullmatch(owner):
                forget(folder, owner)
