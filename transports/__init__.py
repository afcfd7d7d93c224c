"""Transports beyond PyTorch's own process groups."""
