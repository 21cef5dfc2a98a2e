"""Kernels in Triton, each with a twin in plain PyTorch that says what it computes."""
