"""The command ``commlib``."""
