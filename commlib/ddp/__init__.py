"""Communication hook for DistributedDataParallel, and what attaching, detaching and swapping it take."""
