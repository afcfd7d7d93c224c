"""How a gradient travels: one module for each exchange, and what runs them."""
