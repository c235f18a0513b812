"""The conformance kit: what every container, layout, encoding and directory of ckptmap passes.

    from ckptmap.testing import check_container
    def test_my_format(tmp_path):
        check_container(MyReader(), MyWriter(), MY_SETUP, tmp_path)

Each check raises AssertionError with what was found and what was expected; pytest is not needed.
The kits (`ContainerKit`, ...) list their checks in `CHECKS`, for a test each, and can be
subclassed. `MappingKit` does it for a mapping file, of names between schemes. `registered(...)` puts adapters into the registry for a while; for good, name them as
entry points (see `ckptmap.registry`). An example is `examples/toy_container.py`.
"""

from __future__ import annotations

from ckptmap.testing.base import expect, registered
from ckptmap.testing.containers import ContainerKit, check_container
from ckptmap.testing.directories import check_directory
from ckptmap.testing.encodings import SchemeKit, check_scheme
from ckptmap.testing.key_forms import check_key_form
from ckptmap.testing.layouts import check_layout
from ckptmap.testing.mappings import MappingKit
from ckptmap.testing.reading import ReaderKit, check_reader

__all__ = [
    "ContainerKit", "MappingKit", "ReaderKit", "SchemeKit", "check_container", "check_directory",
    "check_key_form", "check_layout", "check_reader", "check_scheme", "expect", "registered",
]  # fmt: skip
