"""Models for benchmarks: the shapes of published networks, and one that only hands out gradients."""
