"""Saved benchmark records as one self-contained HTML page: a verdict in words, pictures, tables, the machine."""
