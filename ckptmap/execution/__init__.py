"""Carry out a plan: copy, compare and encode bytes, then write headers and the manifest."""
