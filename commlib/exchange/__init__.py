"""How a gradient travels."""
