"""`python -c CODE ARGS` for a forked process: python -m tests.corpus.forked_code CODE ARGS"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    code = compile(sys.argv.pop(1), "<string>", "exec")
    exec(code, {"__name__": "__main__"})
