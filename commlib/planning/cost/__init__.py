"""Cost model of exchanges: bytes, seconds on a link, overlap with the backward pass."""
