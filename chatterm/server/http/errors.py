"""Bodies of error responses, in the format that the clients of a path expect."""

from collections.abc import Mapping
from typing import Any

from chatterm.server.service import RequestError


def error_object(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_for(path: str, error: RequestError) -> dict[str, Any]:
    """Return an error in the format of this path's API: Ollama's errors are one text."""
    return {"error": error.message} if path.startswith("/api/") else error_object(error)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error that names a field as the client does; `names` has these by the names that it has elsewhere."""
    if error.param is None or (own := names.get(error.param)) is None:
        return error
    message = (
        own + error.message[len(error.param) :] if error.message.startswith(error.param) else error.message
    )
    return RequestError(error.status, error.kind, message, own, error.code, error.retry_after_s)


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the additional headers of a response with this error."""
    found = []
    if error.retry_after_s is not None:
        found.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    return found


def broken() -> RequestError:
    """Return the error for a bug of the server; its traceback is in the log."""
    return RequestError(
        500, "server_error", "An internal error occurred; the server's log says more.", code="internal"
    )


def stopping() -> RequestError:
    """Return the error for requests while the server shuts down."""
    return RequestError(
        503,
        "server_error",
        "The server is shutting down; try again later.",
        code="shutting_down",
        retry_after_s=10,
    )
