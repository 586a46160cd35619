"""The model that answers where nobody names one."""

DEFAULT_MODEL = "smollm2"
