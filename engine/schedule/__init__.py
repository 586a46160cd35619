"""From requests to steps: sequences, the scheduler, the engine step, what comes out of it."""
