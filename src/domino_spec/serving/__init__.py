"""The server: requests become sequences of one engine, their outputs responses."""
