"""The families of models: from a config to the description of a network."""
