"""``commlib bench train``: would compression help here? Every route trains in turn, against plain DDP or FSDP2."""
