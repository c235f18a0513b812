"""`ckptmap.ranks` is where callers import the ranks of a conversion from."""

from __future__ import annotations

import subprocess
import sys

from ckptmap.execution import ranks

CODE = """
import sys
import ckptmap
assert ckptmap.ranks.join is not None
from ckptmap.ranks import ALONE, GRACE_S, TIMEOUT_S, GlooRanks, Ranks, ShownElsewhere, join
with join(env={}) as alone:
    assert alone is ALONE or isinstance(alone, Ranks)
assert "torch" not in sys.modules
"""


def test_names_are_imported_as_a_module_without_torch() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_names_are_those_of_the_room() -> None:
    import ckptmap.ranks as public

    assert public.join is ranks.join
    assert all(getattr(public, name) is getattr(ranks, name) for name in public.__all__)
