"""Cost of a route to a process: memory, first steps, and time of its cores."""
