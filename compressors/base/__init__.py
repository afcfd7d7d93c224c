"""Bases that codecs of one kind share."""
