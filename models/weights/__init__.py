"""Weights: file formats, quantised blocks, and transfer to a device."""
