"""Plans: which layer goes by which exchange and codec, and what that is expected to cost."""
