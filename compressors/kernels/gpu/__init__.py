"""Kernels for CUDA devices, in Triton."""
