"""``commlib bench link``: what the network gives, raw and through every collective, and the line each follows."""
