"""Filters of a parameter server's messages."""
