"""Benchmarks, which are no part of the installed package."""
