"""The head-to-head: methods against plain decoding on the same path, raw records and figures.

The package imports nothing by itself: the command line reads `settings` without loading torch.
"""
