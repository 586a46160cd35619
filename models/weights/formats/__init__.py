"""The formats of weights: of blocks, of GGUF files, and of the matrices of safetensors checkpoints."""
