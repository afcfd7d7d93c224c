"""Benchmarks and the reference trainer, behind the ``commlib`` command."""
