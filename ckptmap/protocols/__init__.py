"""The protocols of the extension API: containers, layouts, encoding schemes, writers, setups.

A format implements them in one package of `formats/` and is one line in `registry.py`. The code that
opens, plans and executes knows these protocols only and names no format.
"""

from __future__ import annotations

from ckptmap.protocols.encodings import (
    Encoder,
    Encoding,
    Group,
    LooksFirst,
    NamesParts,
    Refusal,
    Scheme,
    Write,
    part_key,
)
from ckptmap.protocols.file_systems import FileSystem, Fingerprint, Mounts, ReadsFiles, through
from ckptmap.protocols.layouts import FlatUnit, Layout, MeshLayout, Placement
from ckptmap.protocols.progress import Progress
from ckptmap.protocols.reading import (
    Container,
    Directory,
    Member,
    Members,
    Place,
)
from ckptmap.protocols.setups import (
    CarriedFile,
    Carrier,
    Declared,
    Demands,
    Filing,
    Grouping,
    Inner,
    Setup,
    TakesMadeFiles,
)
from ckptmap.protocols.writing import OutFile, OutState, OutTensor, Slot, Writer
from ckptmap.tensors import Index, in_saved_order

__all__ = [
    "CarriedFile",
    "Carrier",
    "Container",
    "Declared",
    "Demands",
    "Directory",
    "Encoder",
    "Encoding",
    "FileSystem",
    "Filing",
    "Fingerprint",
    "FlatUnit",
    "Group",
    "Grouping",
    "Index",
    "Inner",
    "Layout",
    "LooksFirst",
    "Member",
    "Members",
    "MeshLayout",
    "Mounts",
    "NamesParts",
    "OutFile",
    "OutState",
    "OutTensor",
    "Place",
    "Placement",
    "Progress",
    "ReadsFiles",
    "Refusal",
    "Scheme",
    "Setup",
    "Slot",
    "TakesMadeFiles",
    "Write",
    "Writer",
    "in_saved_order",
    "part_key",
    "through",
]
