"""The key of a remote: from the environment, the system keyring, or a command. It is never shown."""

import os
import shlex
import subprocess

from chatterm.backends.remote.address import Address
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError

_PATIENCE = 60.0
"""Time limit of a command in seconds: the user may have to unlock something."""


def find_key(address: Address) -> str | None:
    """Return the key for this server; None if none is configured. May wait for a command. Raises EngineError."""
    remote = address.remote
    if remote.key_command is not None:
        return _checked(_printed(remote.key_command), "The output of the key_command")
    if remote.keyring is not None:
        return _checked(_kept(remote.keyring, address.prefix), "The entry in the keyring")
    if remote.key_env is None:
        return None
    key = os.environ.get(remote.key_env, "").strip()
    if not key and "://" not in address.prefix:
        raise EngineError(
            f"{one_line(remote.key_env, 60)} is not set in the environment; {address.setting} expects the key there."
        )
    return _checked(key, f"The value of {one_line(remote.key_env, 60)}") if key else None


def redact(text: str, key: str | None) -> str:
    """Remove the key from a server's message: some servers repeat what they were given."""
    return text.replace(key, "…") if key else text


def _printed(command: str) -> str:
    try:
        words = shlex.split(command)
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"The key_command did not finish within {_PATIENCE:.0f} s; run it by hand."
        ) from None
    except (OSError, ValueError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it cannot be run"
        raise EngineError(f"The key_command failed: {why}; see the settings.") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it printed nothing"]
        raise EngineError(f"The key_command ended with code {done.returncode}: {one_line(lines[-1], 200)}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else ""


def _kept(service: str, user: str) -> str:
    try:
        import keyring
        from keyring.errors import KeyringError
    except ImportError:
        raise EngineError(
            "Keys from the keyring need the package keyring; install it: pip install 'chatterm[keyring]'"
        ) from None
    try:
        found = keyring.get_password(service, user)
    except KeyringError as error:
        raise EngineError(f"The keyring cannot be read: {one_line(str(error), 200)}") from None
    if not found:
        shown = f"{one_line(service, 60)} {one_line(user, 60)}"
        raise EngineError(f"The keyring has no key for this server; store one: keyring set {shown}")
    return str(found).strip()


def _checked(key: str, what: str) -> str:
    if not key:
        raise EngineError(f"{what} is empty; it must be a key.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise EngineError(f"{what} is not a key: it has spaces or characters that a key cannot have.")
    return key
