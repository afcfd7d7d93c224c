"""Sparse logistic regression with a parameter server: delayed block proximal gradient, and a KKT filter."""
