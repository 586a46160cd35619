"""Settings and themes: the files, their text, where they lie."""
