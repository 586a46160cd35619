"""Checked access to the fields of an untrusted config."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from models.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to the fields of an untrusted mapping."""

    raw: Mapping[str, Any]
    where: str
    """What the mapping is, for display: "config.json"."""

    def or_else(self, **values: Any) -> "Fields":
        """Return the fields with these values for missing ones: the defaults of a family."""
        return Fields(
            {**self.raw, **{k: v for k, v in values.items() if self.raw.get(k) is None}}, self.where
        )

    def integer(self, key: str, default: int | None = None, *, least: int = 1, limit: int = 2**24) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            raise self._wrong(key, value, f"a whole number from {least} to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e30:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key, value, f"a list of {count} numbers")
        return tuple(Fields({key: item}, self.where).number(key) for item in value)

    def by_layer(self, key: str, layers: int) -> list[float]:
        """Return a number of any sign for each layer, from a list or from one number for all."""
        value = self._value(key, None)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers or any(type(each) not in (int, float) or isnan(each) for each in found):
            raise ModelError(
                f"{key} in {self.where} is {str(value)[:60]!r}; it must be a number for each of the {layers} layers."
            )
        return [float(each) for each in found]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def mapping(self, key: str) -> "Fields":
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{key} of {self.where}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {key}; it is incomplete, or the model is not supported.")
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        alike = ", the same for all layers" if isinstance(value, list) else ""
        return ModelError(f"{key} in {self.where} is {str(value)[:60]!r}; it must be {allowed}{alike}.")
