"""GPU kernels in Triton, one idea a file. Each names the plain code that it is tested against.

Importing a module of this package imports triton: only code that has chosen a GPU path does so.
"""
