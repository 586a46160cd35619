"""The default model."""

DEFAULT_MODEL = "smollm2"
