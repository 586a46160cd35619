"""The Agent Client Protocol: an editor shows the conversation, chatterm answers."""
