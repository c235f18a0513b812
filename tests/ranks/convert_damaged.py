"""One conversion by two ranks, each of which reads half of a record in which a bit is flipped.

python -m tests.ranks.convert_damaged GOOD BAD FOLDER
"""

from __future__ import annotations

import sys

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.execution.ranks import join


def main(good: str, bad: str, folder: str) -> None:
    with join(60) as ranks:
        report = ckptmap.convert(good, f"{folder}/good", "fsdp2", world_size=2, ranks=ranks)
        if ranks.rank == 0:
            assert report.source.checked and not report.source.unchecked, report.source
    try:
        with join(60) as ranks:
            ckptmap.convert(bad, f"{folder}/worse", "fsdp2", world_size=2, ranks=ranks)
    except CkptmapError as error:  # rank 0 shows it, the other only that it stopped
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
