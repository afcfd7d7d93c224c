"""Deterministic simulation of whole jobs: product code on simulated threads, clock, network and store."""
