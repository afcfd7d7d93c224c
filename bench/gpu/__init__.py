"""Everything about commlib on one GPU, in one command."""
