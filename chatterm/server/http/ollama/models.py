"""/api/tags, /api/ps, /api/show: information about models."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from msgspec import Struct

from chatterm.server.http.fields import Table
from chatterm.server.http.ollama.render import stamp
from chatterm.server.service import ServedModel

VERSION = "0.12.0"
"""The version of Ollama's API that this is a part of; editors query it."""


class ShowRequest(Struct):
    """A request to /api/show."""

    model: str


SHOW = Table(ShowRequest)


def tag(model: ServedModel) -> dict[str, Any]:
    """Return the entry of a model in /api/tags."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _date(model),
        "size": model.file_bytes or model.bytes or 0,
        "digest": sha256(f"{model.name} {model.created}".encode()).hexdigest(),
        "details": _details(model),
    }


def running(model: ServedModel) -> dict[str, Any]:
    """Return the entry of a model in /api/ps."""
    left = timedelta(seconds=model.expires_in_s) if model.expires_in_s is not None else timedelta(days=36500)
    until = datetime.now(UTC) + left
    return {
        **tag(model),
        "size": model.bytes or 0,
        "expires_at": until.isoformat().replace("+00:00", "Z"),
        "size_vram": 0,
        "context_length": model.context_length or 0,
    }


def show_response(model: ServedModel) -> dict[str, Any]:
    """Return the response of /api/show."""
    family = model.family or "unknown"
    return {
        "modelfile": "",
        "parameters": "",
        "template": model.template,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.parameters or 0,
            f"{family}.context_length": model.context_length or 0,
        },
        "capabilities": [
            "completion",
            *(["tools"] if model.tool_format is not None else []),
            *(["thinking"] if model.thinks else []),
        ],
        "modified_at": _date(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    size = f"{model.parameters / 1e9:.1f}B" if model.parameters else ""
    return {
        "parent_model": "",
        "format": "gguf" if model.format.startswith("Q") else "safetensors",
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": size,
        "quantization_level": model.format,
    }


def _date(model: ServedModel) -> str:
    try:
        return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return stamp()
