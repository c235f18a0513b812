"""What the peers' own model-parallel layers hold of one state dict, a table a rank.

One folder a way of cutting, one table a rank, in the form of `tests.golden.mappings.tables`. All of
them hold the same numbers: those of the tiny `llama` of `tests.support.mapping_configs` under the peer's
names. The `make_*.py` scripts beside this file wrote them; the tests read the tables alone.
"""
