"""Version of commlib; pyproject.toml reads it from here, without importing PyTorch."""

__version__ = "0.1.0"
