"""What a DDP step costs with each exchange and codec, when the model computes nothing."""
