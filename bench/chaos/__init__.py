"""Trainings with a parameter server whose processes are killed."""
