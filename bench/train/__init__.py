"""The reference trainer."""
