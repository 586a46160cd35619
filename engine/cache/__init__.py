"""The KV cache: blocks and their rows, the tensors that hold them, offload to host memory, sizing."""
