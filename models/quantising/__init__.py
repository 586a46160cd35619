"""Calibrated quantisation: which digits and scales, which matrices in 8 bits, and the files that hold them."""
