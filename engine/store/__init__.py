"""KV blocks on disk, so that what a conversation has computed is there when the program runs again."""
