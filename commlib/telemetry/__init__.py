"""Counters, traces and the recorder of a run."""
