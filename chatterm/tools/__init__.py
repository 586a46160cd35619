"""Tools that a model may ask for: what they do, what a person is asked before, and what is never done."""
