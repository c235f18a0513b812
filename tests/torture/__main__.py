"""Run one kind of torture: see the package. The exit code is 1 where something new was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from shlex import quote

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.corpus import Corpus
from tests.corpus.shared import Shared
from tests.torture.programs import KINDS, program
from tests.torture.runner import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, default=100, help="how many cases")
    parser.add_argument("--case", type=int, nargs="+", help="these cases alone")
    parser.add_argument("--alone", action="store_true", help="without what several ranks wrote")
    parser.add_argument("--only", default="", help="mutants of what has a name like this alone")
    parser.add_argument("--corpus", type=Path, help="where checkpoints are built, or lie already")
    parser.add_argument("--findings", type=Path, help="write them there, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        folder = Path(name)
        corpus = Corpus(Shared(args.corpus or folder / "corpus"))
        worlds = (1,) if args.alone else (1, 2)
        made = program(args.kind, corpus, folder, worlds, args.only)
        cases = range(args.n) if args.case is None else args.case
        flags = " --alone" * args.alone + f" --only {quote(args.only)}" * bool(args.only)
        tally = run(made, args.seed, cases, folder, flags, print)
    print(tally, flush=True)
    if args.findings is not None:
        args.findings.write_text(json.dumps(tally.to_json(), indent=1) + "\n")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
