"""``commlib bench codec``: what codecs cost."""
