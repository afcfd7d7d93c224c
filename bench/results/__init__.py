"""Records of benchmark results, tables, bytes at the sockets."""
