"""Conversations that outlive the process: records, the tree of branches, the database, export and import."""
