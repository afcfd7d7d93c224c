"""``commlib plan``: how a model would scale over ranks, on paper: no GPUs, no ranks, nothing measured."""
