"""What each rank does in `tests.execution.test_ranks`: python -m tests.ranks.convert_twice SRC FOLDER SETUPS

Every setup of the JSON object SETUPS is converted to, and found complete the second time.
"""

from __future__ import annotations

import json
import sys

import ckptmap
from ckptmap.execution.ranks import join


def main(src: str, folder: str, setups: str) -> None:
    with join(60) as ranks:
        for to, options in json.loads(setups).items():
            ckptmap.convert(src, f"{folder}/{to}", to, ranks=ranks, **options)
            again = ckptmap.convert(src, f"{folder}/{to}", to, ranks=ranks, **options)
            assert "was complete already" in again.notes


if __name__ == "__main__":
    main(*sys.argv[1:])
