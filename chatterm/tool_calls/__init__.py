"""Tool calls as models write them: parsing them from an answer, and grammars for them. For the server and for chats."""
