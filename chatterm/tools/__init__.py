"""Tools that a model may call: the tools themselves, how a person approves calls, and what is never done."""
