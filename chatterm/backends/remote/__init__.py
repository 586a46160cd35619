"""Models that run elsewhere, behind servers with the APIs of OpenAI or of Ollama."""
