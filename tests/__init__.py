"""The tests of ckptmap; `tests.corpus` builds the checkpoints that they read."""
