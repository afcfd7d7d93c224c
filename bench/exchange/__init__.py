"""Cost of a DDP step with each exchange and codec, when the model computes nothing."""
