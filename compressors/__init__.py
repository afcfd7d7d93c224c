"""The built-in codecs, one file each; found through the entry points of pyproject.toml."""
