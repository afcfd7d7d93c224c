"""Which shards there are, who finds out that one is lost, and where they meet."""
