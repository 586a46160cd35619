"""The CPU executor, which runs the native library."""
