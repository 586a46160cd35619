"""What answers: the protocol of a backend, the engine in this process, the thread that talks to either."""
