"""Optimizer state: read under the keys that a file uses, and keyed by parameter name."""
