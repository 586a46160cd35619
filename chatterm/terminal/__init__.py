"""The terminal around the application: keys, clipboard, title, safe text, words."""
