"""Collectives as what one rank sends, receives and computes, one step after another. Pure: nothing here waits."""
