"""Boxes, regions and columns: where bytes of tensors lie, as arithmetic alone."""
