"""Load generator for OpenAI-compatible servers: settings, client, runner, summary, tables.

The package imports nothing by itself: the command line reads `settings` without loading torch.
"""
