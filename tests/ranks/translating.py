"""One conversion with names, shared by ranks: python -m tests.ranks.translating SRC DST"""

from __future__ import annotations

import sys

import ckptmap
from ckptmap.execution.ranks import join


def main(src: str, dst: str) -> None:
    with join(60) as ranks:
        report = ckptmap.convert(src, dst, "full", names="meta", ranks=ranks)
    assert report.fidelity == {"bytes": 17, "exact": 4}


if __name__ == "__main__":
    main(*sys.argv[1:])
