"""Fixtures of tests/models."""

from tests.models.hub_world import server

__all__ = ["server"]
