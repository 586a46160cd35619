"""From requests to steps: sequences, the scheduler, the engine step, output."""
