"""The HTTP API: OpenAI's and Ollama's requests, and what keeps the server safe from whoever sends them."""
