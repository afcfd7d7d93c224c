"""The backend ``"zmq"`` of torch.distributed: collectives over endpoints."""
