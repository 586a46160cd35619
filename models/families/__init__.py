"""Model families: from a config to the description of a network."""
