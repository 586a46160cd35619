"""GPU kernels in Triton, one idea per file. Each file names the plain code that it is tested against.

Importing a module of this package imports triton, so only code that has chosen a GPU path does it.
"""
