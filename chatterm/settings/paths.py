"""The paths of the user's settings and themes, and which of them are refused."""

import os
from pathlib import Path

from chatterm.settings.settings import SettingsError


def config_path() -> Path:
    """Return the settings file: CHATTERM_CONFIG if set, else `config.toml` in the platform's settings folder."""
    given = os.environ.get("CHATTERM_CONFIG")
    if given:
        return Path(given).expanduser()
    from platformdirs import user_config_dir

    return Path(user_config_dir("chatterm", appauthor=False)) / "config.toml"


def user_themes() -> Path:
    """Return the folder of the user's own themes, beside the settings file. It need not exist."""
    return config_path().parent / "themes"


def check_regular(path: Path) -> None:
    """Raise SettingsError if the path is a pipe or a device: reading a named pipe would wait forever."""
    try:
        is_other = path.exists() and not path.is_file() and not path.is_dir()
    except OSError:  # reading it will report this, as it does for a folder
        return
    if is_other:
        raise SettingsError(f"{path} is not a regular file; put a text file in its place.")
