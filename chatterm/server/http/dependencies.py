"""The optional packages that the HTTP API needs."""

from importlib.util import find_spec

from engine.errors import EngineError

_PACKAGES = ("starlette", "uvicorn", "httptools")


def check_extra() -> None:
    """Raise EngineError if packages of the server are not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise EngineError(
            f"The server needs {', '.join(missing)}; install them with: pip install 'chatterm[server]'"
        )
