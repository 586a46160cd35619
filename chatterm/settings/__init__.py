"""Settings and themes: the files, their text, their paths."""
