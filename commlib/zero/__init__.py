"""A step whose optimizer is shared out: every rank updates the part of the parameters that it owns."""
