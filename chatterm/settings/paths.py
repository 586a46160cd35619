"""Where a person's settings and themes lie, and what cannot be such a file."""

import os
from pathlib import Path

from chatterm.settings.settings import SettingsError


def config_path() -> Path:
    """The settings file: CHATTERM_CONFIG where that is set, or `config.toml` where this platform keeps settings."""
    given = os.environ.get("CHATTERM_CONFIG")
    if given:
        return Path(given).expanduser()
    from platformdirs import user_config_dir

    return Path(user_config_dir("chatterm", appauthor=False)) / "config.toml"


def user_themes() -> Path:
    """The folder of a person's own themes, beside the settings file. It need not exist."""
    return config_path().parent / "themes"


def check_regular(path: Path) -> None:
    """Raises SettingsError for what is there and is no file: reading a named pipe would wait for ever."""
    try:
        is_other = path.exists() and not path.is_file() and not path.is_dir()
    except OSError:  # reading it will say so, as it does of a folder
        return
    if is_other:
        raise SettingsError(f"{path} is not a regular file; put a text file in its place.")
