"""Calibrated quantisation: fitting digits and scales, choosing matrices to keep in 8 bits, and writing the files."""
