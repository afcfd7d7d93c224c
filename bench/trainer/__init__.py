"""The reference trainer behind ``commlib train``: real DDP training with compressed gradients."""
