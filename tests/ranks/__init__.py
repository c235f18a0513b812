"""Programs that `tests.corpus.ranks.run_ranks` runs on N gloo ranks."""
