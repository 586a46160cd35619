"""Models on the Hugging Face Hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from models.errors import ModelError
from models.progress import OnProgress

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_REASON = "a pickle may run code when it is opened; use a safetensors or GGUF version of the model."

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_ID = re.compile(rf"({_PART}/{_PART})(?:@([\w][\w./-]*))?", re.ASCII)
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(.*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub: a repository in Hugging Face layout, or one GGUF file of it."""

    repo: str
    """`owner/name`."""
    revision: str = "main"
    """A branch, a tag or a commit."""
    file: str | None = None
    """The path of the GGUF file in the repository; None for Hugging Face layout."""

    @property
    def name(self) -> str:
        """What to write to get this model again."""
        if self.file is None:
            return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"
        return f"hf.co/{self.repo}{'' if self.revision == 'main' else '/blob/' + self.revision}/{self.file}"


def parse_id(text: str) -> HubModel | None:
    """`owner/name` or `owner/name@revision`; None when `text` is neither."""
    match = _ID.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return HubModel(match[1], match[2] or "main")


def parse_url(text: str) -> HubModel | None:
    """`hf.co/...` or `https://huggingface.co/...`; None when `text` is no such address. Raises ModelError."""
    match = _URL.fullmatch(text)
    if match is None:
        return None
    rest = unquote(match[1].partition("?")[0].partition("#")[0]).strip("/")
    if rest.endswith(".gguf"):
        parts = rest.split("/")
        revision = "main"
        path = parts[2:]
        if path[:1] in (["blob"], ["resolve"]) and len(path) > 2:
            revision, path = path[1], path[2:]
        model = parse_id("/".join(parts[:2]))
        if model is not None and path and ".." not in path:
            return HubModel(model.repo, revision, "/".join(path))
    else:
        repo, _, revision = rest.partition("/tree/")
        model = parse_id(f"{repo}@{revision}" if revision else repo)
        if model is not None:
            return model
    raise ModelError(
        f"{text} is not the address of a model; write hf.co/owner/name or hf.co/owner/name/file.gguf."
    )


def fetch(model: HubModel, *, on_progress: OnProgress | None, offline: bool, refresh: bool) -> Path:
    raise ModelError(f"{model.name}: the Hub is not there yet.")


def cached_models() -> list[tuple[HubModel, Path, int]]:
    return []


def remove(model: HubModel) -> int:
    return 0
