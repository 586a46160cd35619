"""What the shell offers after Tab. Nothing heavy is imported: a person waits."""

from contextlib import suppress


def model_names(incomplete: str) -> list[str]:
    """Names of the catalogue, of the models on this machine and of the remotes in the settings that begin like this."""
    from chatterm.settings.settings import SettingsError
    from models.errors import ModelError
    from models.hub import catalogue
    from models.hub.sources import local_models

    names = dict.fromkeys(catalogue.names())
    with suppress(ModelError, OSError, RuntimeError):  # a cache that cannot be read has nothing to offer
        names |= dict.fromkeys(model.name for model in local_models())
    with suppress(SettingsError, OSError, RuntimeError):  # nor have settings that make no sense
        from chatterm.settings.paths import config_path
        from chatterm.settings.reading import load_settings

        names |= dict.fromkeys(load_settings(config_path()).remotes)
    return [name for name in names if name.startswith(incomplete)]
