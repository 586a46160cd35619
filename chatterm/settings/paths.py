"""Where a person's settings and themes lie."""

import os
from pathlib import Path


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
