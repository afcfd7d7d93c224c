"""Terms that all processes of a parameter server's job must agree on: chunks, consistency, worker groups."""
