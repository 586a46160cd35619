"""What screens and commands chat with: the protocol, the local engine, the thread that talks to it."""
