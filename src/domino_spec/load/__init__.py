"""Load on a server: requests from another process, and what they met."""
