"""The logger `ckptmap`: what a program that uses the library can record.

INFO     each call with its arguments, each phase of its work, what continues an interrupted run,
         what was published
WARNING  the notes of a run, which reports and the command line show, too

Nothing is printed unless the program sets logging up: `logging.basicConfig(level="INFO")`.
"""

from __future__ import annotations

import logging

log = logging.getLogger("ckptmap")
log.addHandler(logging.NullHandler())
