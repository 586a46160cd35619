"""What is sent to a server and what comes back, for each API: no network here."""
