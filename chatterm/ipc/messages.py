"""The messages in frames: numbered calls, so that many run on one connection, and their results.

Bodies are encoded by the code that knows their type. Everything received is validated against its type.
"""

from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from chatterm.ipc.frames import FrameError, encode_frame

T = TypeVar("T")


class Call(Struct, frozen=True, array_like=True, tag="call"):
    """From a client: run `method`. Ids are unique within a connection."""

    id: int
    method: str
    body: Raw


class Feed(Struct, frozen=True, array_like=True, tag="feed"):
    """From a client: input that a running call has asked for."""

    id: int
    body: Raw


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """From a client: cancel this call. Its final message is still sent."""

    id: int


class Item(Struct, frozen=True, array_like=True, tag="item"):
    """To a client: the next item of a call."""

    id: int
    body: Raw


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """To a client: the call is over, with this result."""

    id: int
    body: Raw


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """To a client: the call is over, with an error. `fields` holds what this kind has besides the message."""

    id: int
    kind: str
    message: str
    fields: dict[str, Any]


ToServer = Call | Feed | Cancel
ToClient = Item | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_from_client: "msgspec.msgpack.Decoder[ToServer]" = msgspec.msgpack.Decoder(ToServer)
_from_server: "msgspec.msgpack.Decoder[ToClient]" = msgspec.msgpack.Decoder(ToClient)

NOTHING = Raw(_encoder.encode(None))


def pack(value: Any) -> Raw:
    """Encode a body. Raises FrameError for text that is not valid Unicode, and for numbers that are too large."""
    try:
        return Raw(_encoder.encode(value))
    except UnicodeEncodeError:
        raise FrameError("The text is not valid Unicode (a lone surrogate); remove that character.") from None
    except OverflowError:
        raise FrameError("A number is too large; whole numbers must be from -2^63 to 2^64 - 1.") from None


def unpack(body: Raw | bytes, kind: type[T]) -> T:
    """Decode a body as a `kind`. Raises FrameError if it is not one."""
    try:
        value: T = _decoder(kind).decode(body)  # type: ignore[arg-type]
        return value
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"The other side sent something unexpected: {error}") from None


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind)


def to_frame(message: ToServer | ToClient) -> bytes:
    return encode_frame(_encoder.encode(message))


def from_client(body: bytes) -> ToServer:
    """Decode a message from a client. Raises FrameError."""
    return _decoded(_from_client, body)


def from_server(body: bytes) -> ToClient:
    """Decode a message from the server. Raises FrameError."""
    return _decoded(_from_server, body)


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"The other side sent something unexpected: {error}") from None
