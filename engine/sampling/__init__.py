"""From logits to tokens, on the host or on a GPU."""
