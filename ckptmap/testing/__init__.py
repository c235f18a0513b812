"""The conformance kit: checks that every adapter of ckptmap passes, for authors of new ones.

    from ckptmap.testing import check_container

    def test_my_format(tmp_path):
        check_container(MyReader(), MyWriter(), MY_SETUP, tmp_path)

Choose the check by what you have written:

    check_container   a file format that is read and written (Container, Writer, Setup)
    check_reader      a file format that is only read, with a file of another library as the truth
    check_directory   a framework's directory, made of files in known formats (Directory)
    check_layout      a way to shard tensors over ranks (Layout)
    check_scheme      a quantization: encode, decode, recognize (Scheme, Encoding)
    check_key_form    a way to key optimizer state (KeyForm)
    MappingKit        a mapping file between naming schemes

A check raises AssertionError that states what was expected and what was found; pytest is not needed. For
one test a check, the kits (`ContainerKit`, `ReaderKit`, `SchemeKit`) list theirs in `CHECKS`, and can be
subclassed. An adapter need not be installed: `registered(...)` puts it into the registry for a while. To
install it, name it as an entry point (see `ckptmap.registry`). `examples/toy_container.py` is an example.
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
