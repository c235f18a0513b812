"""What the peers' own code makes of one state dict under each of their naming schemes.

One folder a tiny model of `tests.support.mapping_configs`: its `config.json`, and one table a scheme. Every
table of a folder holds the same numbers, `tests.support.mapping_configs.iota` of the keys in `hf.tsv`. The
`make_*.py` scripts beside this file wrote them, each with the code of the peer that it names; the
tests read the tables alone.
"""
