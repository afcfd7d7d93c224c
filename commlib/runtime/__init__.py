"""What commlib needs of PyTorch, Python and CUDA: autograd, streams, scratch memory, mixed precision, plug-ins."""
