"""Codes with one scale a block: geometry, arithmetic, and what encodings of that kind share."""
