"""From a model's name to its files: the catalogue, the Hub, downloads."""
