"""Weights: the formats of files, quantised blocks, and how they get to a device."""
