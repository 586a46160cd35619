"""What computes a step: the batch, and the executors that run it."""
