"""Descriptions of networks, and where their weights and tokenizers come from."""
