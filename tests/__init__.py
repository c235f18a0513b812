"""The tests of ckptmap. Those of `ckptmap/<room>/` are in `tests/<room>/`, those of the whole package here.

corpus/   real checkpoints that the test run makes with the writers of torch and of other libraries,
          and `run_ranks`, which starts ranks
golden/   files that other libraries made once, with the scripts that made them; digests of our outputs
ranks/    programs for several ranks, run by name: `run_ranks("tests.ranks.dcp", 2, [folder])`
support/  models, files and servers that several test files share; the marks `ranks` and `slow`;
          `forked`, processes to kill that need no import of torch each
"""
