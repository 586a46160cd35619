"""KV blocks on disk: what a conversation has computed is there when the program runs again."""
