"""Lightning, Accelerate and transformers."""
