"""Steps with a parameter server: against the line, and against what the recursion of waits foretells."""
