"""The KV cache: which rows lie in which block, the tensors behind the blocks, offload to host memory, its size."""
