"""A conversation without a screen: the tree of exchanges, turns, figures, what is shown and saved of it."""
