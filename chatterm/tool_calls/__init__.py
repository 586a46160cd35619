"""Calls of tools as models write them: found in an answer, and bound to a grammar. For the server and for chats."""
