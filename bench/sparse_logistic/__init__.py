"""Sparse logistic regression over a parameter server: delayed block proximal gradient, and a KKT filter."""
