"""Kernels of our own: Triton for GPUs, C++ for CPUs, one idea a file.

Each names the plain code that it is tested against.
"""
