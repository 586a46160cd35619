"""The HTTP API: OpenAI's and Ollama's endpoints, and the server's protection from its clients."""
