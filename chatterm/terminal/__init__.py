"""The terminal around the application: keyboard, clipboard, title, sanitized text, wording."""
