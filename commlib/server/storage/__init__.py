"""Snapshots of a shard on disk."""
