"""The part of Ollama's API that editors use."""
