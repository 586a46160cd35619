"""A chat without a screen, line by line: `chatterm run --inline`."""
