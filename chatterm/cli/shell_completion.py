"""Completions for the shell's Tab. Nothing heavy is imported, as a person waits."""

from contextlib import suppress


def model_names(incomplete: str) -> list[str]:
    """Return the names that begin with `incomplete`: of the catalogue, of models on this machine, and of remotes."""
    from chatterm.settings.settings import SettingsError
    from models.errors import ModelError
    from models.hub import catalogue
    from models.hub.sources import local_models

    names = dict.fromkeys(catalogue.names())
    with suppress(ModelError, OSError, RuntimeError):  # an unreadable cache offers nothing
        names |= dict.fromkeys(model.name for model in local_models())
    with suppress(SettingsError, OSError, RuntimeError):  # nor do invalid settings
        from chatterm.settings.paths import config_path
        from chatterm.settings.reading import load_settings

        names |= dict.fromkeys(load_settings(config_path()).remotes)
    return [name for name in names if name.startswith(incomplete)]
