"""The contract of a codec, its state from step to step, and where codecs are found by name."""
