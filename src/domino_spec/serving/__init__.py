"""The server: requests become rows of one engine, blocks become streams."""
