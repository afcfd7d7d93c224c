"""Kernels in plain PyTorch: what all others must equal byte for byte."""
