"""Sufficient factors: the gradient of a linear layer leaves as the rows it is made of."""
