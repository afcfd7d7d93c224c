"""Training by local steps: ranks meet every so many, and what they exchange is how far each has come."""
