"""How a step is computed: the batch, and the executors that run it."""
