"""Colour themes: one TOML file each in themes/."""

import tomllib
from pathlib import Path

from textual.theme import Theme

from chatterm.backend import EngineError

FOLDER = Path(__file__).resolve().parent.parent / "themes"
STYLESHEET = FOLDER / "chatterm.tcss"
DEFAULT_THEME = "graphite"


def theme_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_theme(name: str) -> Theme:
    """Raises EngineError when there is no such theme."""
    if name not in theme_names():
        raise EngineError(f"There is no theme {name!r}; there are {', '.join(theme_names())}.")
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return Theme(name=name, dark=data["dark"], variables=data["variables"], **data["colors"])
