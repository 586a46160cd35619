"""`chatterm serve`: the HTTP API, and the process behind it that owns the engine."""
