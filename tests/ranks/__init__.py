"""Modules that run under N gloo ranks, by `tests.corpus.ranks.run_ranks`."""
