"""The executor of the native library."""
