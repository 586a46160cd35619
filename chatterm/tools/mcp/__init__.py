"""Servers of the Model Context Protocol: their configuration, a client, and their tools as tools of a session."""
