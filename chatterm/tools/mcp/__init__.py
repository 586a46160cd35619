"""Servers of the Model Context Protocol: which there are, a client, and their tools as tools of a session."""
