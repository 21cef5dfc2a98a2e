"""Kernels in Triton, each with a reference implementation in PyTorch."""
