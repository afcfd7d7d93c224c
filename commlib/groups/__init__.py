"""Process groups: their ranks, their stores, and the agreement of all ranks before the first step."""
