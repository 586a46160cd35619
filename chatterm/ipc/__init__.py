"""The private channel between the engine process and its clients on this machine: a Unix socket with bounded frames."""
