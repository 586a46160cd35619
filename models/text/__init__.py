"""Text and tokens: tokenizers, chat templates, incremental decoding."""
