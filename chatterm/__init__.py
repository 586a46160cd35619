"""The application: commands, screens, sessions, settings."""
