"""What codecs of one kind share."""
