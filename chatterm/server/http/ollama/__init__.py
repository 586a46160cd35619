"""The part of the API of Ollama that editors use."""
