"""Starting the ranks of a benchmark."""
