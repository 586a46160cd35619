"""What stands in place of a slot where a short convolution finds no row in the KV cache."""

NONE = -1
"""There is no such row: the text begins after it, or the row that sees it is padding."""
COMPUTED_HERE = -2
"""The row is computed in the same step, so many rows of the step before."""
