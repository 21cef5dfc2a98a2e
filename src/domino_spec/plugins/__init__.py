"""Plugins for other engines: what vLLM and SGLang need to serve a Domino drafter."""
