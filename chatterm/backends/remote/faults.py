"""What a server's refusal and a lost connection mean: one line for a person, and whether to ask again."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from os import strerror
from typing import Any

from chatterm.backends.remote.address import Address
from chatterm.backends.remote.dialects.base import OPTIONAL, complaint
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.wording import sentences

LONGEST_WAIT = 600.0
"""Seconds that a server may ask to wait for; beyond that the person is told instead."""
_BUSY = (429, 503, 529)
_TRIES = 6
_NO_TLS = ("WRONG_VERSION_NUMBER", "record layer", "UNEXPECTED_EOF", "HTTP_REQUEST")
"""What OpenSSL says where the other side speaks something else."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer of HTTP that is no answer."""

    status: int
    body: bytes
    """The beginning of it."""
    retry_after: str | None = None
    location: str | None = None


def wait_of(refused: Refused, tries: int, now: datetime | None = None) -> float | None:
    """Seconds to wait before it is asked again, having been asked `tries` times; None: not again."""
    if refused.status not in _BUSY or tries >= _TRIES:
        return None
    seconds = _seconds(refused.retry_after, now or datetime.now(UTC))
    if seconds is None:
        return float(2 ** (tries - 1)) if refused.status == 429 else None
    return max(seconds, 0.5) if seconds <= LONGEST_WAIT else None


def _seconds(value: str | None, now: datetime) -> float | None:
    """What a Retry-After says, in seconds from now; None where it says nothing."""
    if not value:
        return None
    if re.fullmatch(r"\s*\d{1,9}(\.\d{1,6})?\s*", value, re.ASCII):
        return float(value)
    try:
        when = parsedate_to_datetime(value)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def refusal(refused: Refused, address: Address, has_key: bool) -> str:
    """What a refusal means, in a line."""
    host, said = one_line(address.host, 80), said_by(refused.body)
    status = refused.status
    if 300 <= status < 400:
        where = one_line(refused.location or "elsewhere", 120)
        return f"{host} redirects to {where}; nothing was sent there. If that is the right server, use its address."
    if status == 401:
        way = f"Check the key that {address.setting} names" if has_key else _ways(address)
        return sentences(f"{host} {'rejects the key' if has_key else 'requires a key'} (401)", said, way)
    if status == 403:
        return sentences(f"{host} does not allow this (403)", said, "Check what the key is allowed to do")
    if status == 404:
        return sentences(f"{host} has no {one_line(address.model, 80) or 'such page'} (404)", said)
    if status == 407:
        return (
            "The proxy requires a login (407); put the user name and password into HTTPS_PROXY, or add "
            f"{host} to NO_PROXY."
        )
    if status in _BUSY:
        again = _seconds(refused.retry_after, datetime.now(UTC))
        when = f"try again in {again / 60:,.0f} min" if again and again > 60 else "try again later"
        what = "is limiting requests" if status == 429 else "is overloaded, or still loading the model"
        return sentences(f"{host} {what} ({status})", said, when)
    if status >= 500:
        return sentences(f"{host} failed ({status})", said, "Try again; the server's log says more")
    return sentences(f"{host} refuses the request ({status})", said)


def without_tools(refused: Refused) -> str:
    """What to do where a server refuses a request because of its tools, to follow what it said; else ""."""
    if refused.status not in (400, 404, 422, 500, 501) or "tool" not in said_by(refused.body).lower():
        return ""
    return " /tools off sends messages without tools."


def _ways(address: Address) -> str:
    if "://" in address.prefix:
        return "Name the server in the settings as [remotes.NAME], with key_env, key_command or keyring"
    return f"Give {address.setting} a key_env, key_command or keyring"


def said_by(body: bytes) -> str:
    """What the body of a refusal says, in a line; "" where it is nothing for a person."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return "" if b"<" in body[:200] else one_line(body[:2000].decode("utf-8", "replace"), 300)
    return one_line(complaint(document), 300) if isinstance(document, dict) else ""


def refused_field(refused: Refused, body: Mapping[str, Any]) -> str | None:
    """A field of the request that this server does not take and an answer can do without; None: it is not that."""
    if refused.status not in (400, 422):
        return None
    said = refused.body.decode("utf-8", "replace")
    return next((name for name in OPTIONAL if name in body and name in said), None)


def lost(
    error: BaseException, address: Address, proxy: str | None = None, *, in_handshake: bool = False
) -> str:
    """Why there is no connection, in a line; `proxy` stands between, where there is one.

    `in_handshake` where it stood, and was being made https.
    """
    import httpx

    host = one_line(address.host, 80)
    chain = _chain(error)
    if any(type(one).__name__ == "SSLCertVerificationError" for one in chain) or "CERTIFICATE_VERIFY" in str(
        error
    ):
        why = next(
            (getattr(one, "verify_message", "") for one in chain if getattr(one, "verify_message", "")), ""
        )
        why = one_line(why, 80) or "it cannot be verified"
        return f"The certificate of {host} is not trusted ({why}); set ca_file for it in {address.setting}."
    if any(sign in str(one) for one in chain for sign in _NO_TLS):
        return f"{host} does not speak https; write openai+http://…, or http:// in the settings."
    is_late = isinstance(error, (httpx.TimeoutException, TimeoutError))
    if (
        is_late and in_handshake
    ):  # a server of plain HTTP may wait for the rest of what it takes for a request
        return f"{host} answers, but not over https; write openai+http://…, or http:// in the settings."
    if isinstance(error, ImportError):
        return "A SOCKS proxy needs the package socksio; install it: pip install 'httpx[socks]'"
    if isinstance(error, httpx.ProxyError):
        return f"The proxy does not connect to {host}: {one_line(str(error), 120)}. See HTTPS_PROXY and NO_PROXY."
    if isinstance(error, (httpx.InvalidURL, ValueError)):
        return f"The address of a proxy in the environment is not valid: {one_line(str(error), 120)}. See HTTPS_PROXY."
    if is_late:
        return f"{host} does not answer; check its address and the network."
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
        return f"{host} has closed the connection; is its server still running?"
    if isinstance(error, httpx.LocalProtocolError):
        return f"The request cannot be sent: {one_line(str(error), 120)}."
    if proxy is not None and isinstance(error, httpx.ConnectError):
        which = one_line(proxy.rpartition("@")[2].rpartition("/")[2], 80)
        return f"The proxy {which}, which leads to {host}, cannot be reached; see HTTPS_PROXY and NO_PROXY."
    failed = next((one for one in reversed(chain) if isinstance(one, OSError) and one.errno), None)
    # asyncio adds the address to its own text
    why = strerror(failed.errno) if failed is not None and failed.errno else ""
    if any(type(one).__name__ == "gaierror" for one in chain):
        return f"No host named {host} was found; check the spelling and the network."
    said = one_line(why or str(error) or type(error).__name__, 120)
    return f"{host} cannot be reached ({said}); is its server running?"


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
