"""The executor for NVIDIA GPUs: Triton kernels, CUDA graphs, the decode runner."""
