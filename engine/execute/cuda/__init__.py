"""The executor of NVIDIA GPUs: Triton kernels, CUDA graphs, the decode runner."""
