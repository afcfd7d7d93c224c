"""PyTorch, Python and CUDA as commlib needs them: autograd, streams, scratch memory, mixed precision, plug-ins."""
