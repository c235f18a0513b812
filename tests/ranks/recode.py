"""One conversion by several ranks, codes kept: run by `run_ranks`."""

from __future__ import annotations

import sys

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.execution.ranks import join


def main(source: str, outliers: str, folder: str) -> None:
    with join(60) as ranks:
        for to in ("fsdp2-nf4", "fsdp2-bnb-nf4-dq"):
            ckptmap.convert(source, f"{folder}/{to}", to, world_size=3, ranks=ranks)
    try:
        with join(60) as ranks:
            ckptmap.convert(outliers, f"{folder}/coarse", "fsdp2-nf4", ranks=ranks)
    except CkptmapError as error:  # rank 0 shows it, the other only that it stopped
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
