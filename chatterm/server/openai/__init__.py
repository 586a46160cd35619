"""The API of OpenAI."""
