"""The requests and responses of each API: no network here."""
