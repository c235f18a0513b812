"""The command line on ranks of which rank 1 does not see what rank 0 writes: the destination is no shared file system.

    python -m tests.ranks.blind_command_line convert SRC DST ...

Only for rank 1 the files of a work directory are not there. It ends as `tests.ranks.command_line` does.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from unittest.mock import patch

from ckptmap.__main__ import main

is_file = Path.is_file


def elsewhere(path: Path) -> bool:
    return ".ckptmap-" not in str(path) and is_file(path)


if __name__ == "__main__":
    atexit._clear()
    if os.environ["RANK"] == "1":
        patch.object(Path, "is_file", elsewhere).start()
    try:
        main()
    finally:
        atexit._run_exitfuncs()
