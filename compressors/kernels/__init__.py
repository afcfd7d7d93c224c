"""The hot loops of the codecs. ``reference`` is the truth the others are tested against."""
