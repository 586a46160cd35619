"""The engine process: the models, the clients of its socket, and their requests."""
