"""The server's side: one shard, its chunks, its process."""
