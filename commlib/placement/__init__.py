"""Layers that stay put: a rank keeps some rows of the weight for good, and activations travel instead of gradients."""
