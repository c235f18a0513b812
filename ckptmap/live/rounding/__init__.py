"""Stochastic rounding whose random bits depend on the weight, its step and a seed, and on nothing else.

    rounding = ckptmap.live.rounding.install(optimizer, seed=7, model=model)

torchao's optimizers draw the bits of bfloat16 rounding from each rank's random generator, so that a run
gives other weights on another number of ranks. Here they are a hash of (seed, step, FQN, position in the
whole tensor).
"""

from ckptmap.live.rounding.installation import InstalledRounding, install

__all__ = ["InstalledRounding", "install"]
