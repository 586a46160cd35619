"""What a network computes, and where its weights and its tokenizer come from."""
