"""Groups of workers, and groups of servers."""
