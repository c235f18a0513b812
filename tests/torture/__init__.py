"""The torture: seeded attacks on the promise that every byte is accounted for, or nothing is published.

    python -m tests.torture mutants --seed 1 -n 10000     # what is damaged or contradicts itself as a source
    python -m tests.torture flips --seed 1 -n 2000        # one bit of an output: does verify find it?
    python -m tests.torture faults --seed 1 -n 2000       # the n-th file-system call fails, or is the last
    python -m tests.torture power --seed 1 -n 500         # what was not synced is lost
    python -m tests.torture flips --seed 1 --case 17      # one case again
    python -m tests.torture mutants -n 400 --only megatron          # of subjects with a name like this

A case depends on the kind, the seed, its number and the subjects alone, and runs in a
process of its own.
"""
