"""Models on servers that have the API of OpenAI or of Ollama."""
