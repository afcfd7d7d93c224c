"""Watching a run: logs, compression errors, equal replicas, ``commlib top``."""
