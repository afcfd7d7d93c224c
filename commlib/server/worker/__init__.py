"""The worker's side of a parameter server."""
