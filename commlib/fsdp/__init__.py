"""FSDP2: gradients go to the ranks that own them in fewer bytes, and parameters come back in fewer bytes."""
