"""The backends that screens and commands talk to: the protocol, the local engine, and the thread that calls it."""
