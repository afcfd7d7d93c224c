"""The bandwidth manager: it measures the link, the arithmetic and the backward pass, and decides layer by layer."""
