"""The meaning of a server's refusal or a lost connection: one line for the user, and whether to retry."""

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
"""Longest wait in seconds that a server may ask for; beyond that the user is told instead."""
_BUSY = (429, 503, 529)
_TRIES = 6
_NO_TLS = ("WRONG_VERSION_NUMBER", "record layer", "UNEXPECTED_EOF", "HTTP_REQUEST")
"""Error texts of OpenSSL if the other side does not speak TLS."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An HTTP response that refuses the request."""

    status: int
    body: bytes
    """The beginning of the body."""
    retry_after: str | None = None
    location: str | None = None


def retry_delay(refused: Refused, tries: int, now: datetime | None = None) -> float | None:
    """Return the seconds to wait before the next try, after `tries` tries; None: do not retry."""
    if refused.status not in _BUSY or tries >= _TRIES:
        return None
    seconds = _seconds(refused.retry_after, now or datetime.now(UTC))
    if seconds is None:
        return float(2 ** (tries - 1)) if refused.status == 429 else None
    return max(seconds, 0.5) if seconds <= LONGEST_WAIT else None


def _seconds(value: str | None, now: datetime) -> float | None:
    """Return the seconds from now that a Retry-After header gives; None if it gives none."""
    if not value:
        return None
    if re.fullmatch(r"\s*\d{1,9}(\.\d{1,6})?\s*", value, re.ASCII):
        return float(value)
    try:
        when = parsedate_to_datetime(value)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def explain_refusal(refused: Refused, address: Address, has_key: bool) -> str:
    """Explain a refusal in one line."""
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
    if status == 413:
        way = "Shorten the conversation, or attach less"
        return sentences(f"{host} takes no request as large as this one (413)", said, way)
    if status in _BUSY:
        again = _seconds(refused.retry_after, datetime.now(UTC))
        when = f"try again in {again / 60:,.0f} min" if again and again > 60 else "try again later"
        what = "is limiting requests" if status == 429 else "is overloaded, or still loading the model"
        return sentences(f"{host} {what} ({status})", said, when)
    if status >= 500:
        return sentences(f"{host} failed ({status})", said, "Try again; the server's log says more")
    return sentences(f"{host} refuses the request ({status})", said)


def without_tools(refused: Refused) -> str:
    """Return advice to append if a server refuses a request because of its tools; otherwise ""."""
    if refused.status not in (400, 404, 422, 500, 501) or "tool" not in said_by(refused.body).lower():
        return ""
    return " /tools off sends messages without tools."


def _ways(address: Address) -> str:
    if "://" in address.prefix:
        return "Name the server in the settings as [remotes.NAME], with key_env, key_command or keyring"
    return f"Give {address.setting} a key_env, key_command or keyring"


def said_by(body: bytes) -> str:
    """Return the message in the body of a refusal, in one line; "" if it is not meant for people."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return "" if b"<" in body[:200] else one_line(body[:2000].decode("utf-8", "replace"), 300)
    return one_line(complaint(document), 300) if isinstance(document, dict) else ""


def refused_field(refused: Refused, body: Mapping[str, Any]) -> str | None:
    """Return an optional request field that this server rejects; None if that is not the reason."""
    if refused.status not in (400, 422):
        return None
    said = refused.body.decode("utf-8", "replace")
    return next((name for name in OPTIONAL if name in body and name in said), None)


def explain_lost(
    error: BaseException, address: Address, proxy: str | None = None, *, in_handshake: bool = False
) -> str:
    """Explain in one line why there is no connection; `proxy` is the proxy in between, if any.

    `in_handshake`: the connection was open and its TLS handshake was running.
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
    if is_late and in_handshake:  # a plain HTTP server may wait for the rest of what it takes for a request
        return f"{host} answers, but not over https; write openai+http://…, or http:// in the settings."
    if isinstance(error, ImportError):
        return "A SOCKS proxy needs the package socksio; install it: pip install 'httpx[socks]'"
    if isinstance(error, httpx.ProxyError):
        return f"The proxy does not connect to {host}: {one_line(str(error), 120)}. See HTTPS_PROXY and NO_PROXY."
    if isinstance(error, (httpx.InvalidURL, ValueError)):
        return f"The address of a proxy in the environment is not valid: {one_line(str(error), 120)}. See HTTPS_PROXY."
    if isinstance(error, httpx.ReadTimeout):  # only the head of a response has such a limit
        return f"{host} began to answer and then sent next to nothing; check the server and the network."
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
