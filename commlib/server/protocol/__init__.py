"""Messages between workers and shards, and their encoding."""
