"""Optimizer state: key forms (one file each), the order behind an index, what a plan carries."""
