"""What the shell offers after Tab. Nothing heavy is imported: a person waits."""

from contextlib import suppress


def model_names(incomplete: str) -> list[str]:
    """Names of the catalogue, and of the models on this machine, that begin like this."""
    from models.errors import ModelError
    from models.hub import catalogue
    from models.hub.sources import local_models

    names = dict.fromkeys(catalogue.names())
    with suppress(ModelError, OSError):  # a cache that cannot be read has nothing to offer
        names |= dict.fromkeys(model.name for model in local_models())
    return [name for name in names if name.startswith(incomplete)]
