"""Published heads: EAGLE-3, MTP, DFlash, DFlash 2, DSpark."""
