"""Name a file of another program, or a packed one, by its first bytes, and a directory by an entry that marks it; say
what to do with it."""

from __future__ import annotations

import re
from pathlib import Path

from ckptmap.core.printable import quote
from ckptmap.protocols import Place

PYTORCH = "give a PyTorch checkpoint; ckptmap reads no other framework's files"
_ORIGINAL = "convert from the original safetensors instead"
_BARE = "if you trust it, load it with its own program and torch.save a dict of tensors"
FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"ggjt", "a GGML file of llama.cpp", _ORIGINAL),
    (b"tjgg", "a GGML file of llama.cpp", _ORIGINAL),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it", PYTORCH),
    (b"\x93NUMPY", "a numpy array", "save a state dict with safetensors or torch.save"),
    (b"\x1f\x8b", "packed with gzip", "gunzip .gz"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", "unzstd .zst"),
    (b"\xfd7zXZ", "packed with xz", "unxz .xz"),
    (b"BZh", "packed with bzip2", "bunzip2 .bz2"),
    *((b"}q" + bytes([n]), "a bare pickle", _BARE) for n in range(2)),
    *((b"\x80" + bytes([n]), "a bare pickle", _BARE) for n in range(2, 6)),
)
"""The first bytes of a file, what such a file is, and the next step: for a packed one the program that unpacks it, and
the suffix without which that program refuses."""
TEXT_PICKLE = re.compile(rb"(\(dp\d+\n|\(lp\d+\n|c[\w.]+\n[\w.]+\n)")
"""How a pickle of protocol 0 begins, which is text: a dict, a list, or an object of a class."""
PACKED_TAR = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$")
TAR_MAGIC = 257
"""Offset of the magic bytes of a tar archive."""
OTHER_FRAMEWORKS = (
    r".*\.(h5|keras|msgpack|ckpt\.index|onnx|tflite)|saved_model\.pb"
    r"|manifest\.ocdbt|_CHECKPOINT_METADATA"
)
MARKS: tuple[tuple[str, str, str], ...] = (
    (r"\.metadata\.tmp", "an unfinished DCP save (only .metadata.tmp)", "use an earlier checkpoint"),
    (r"__\d+\.metadata", "a DCP save with one metadata file per rank (use_collectives=False)", "save it again with use_collectives=True"),
    (r"adapter_config\.json", "a peft adapter without its base weights", ""),  # merge_step
    (r".*\.distcp", "DCP data files without their .metadata", "copy .metadata too; if there is none, the save did not finish: use an earlier checkpoint"),
    (r"common\.pt", "the directory of a Megatron save without its .metadata: the save did not finish", "use an earlier checkpoint"),
    (r".*\.ggml", "GGML weights", "convert them from the original safetensors"),
    (OTHER_FRAMEWORKS, "a directory of weights of another framework", PYTORCH),
)  # fmt: skip
"""A pattern of the whole name of an entry, what a directory with such an entry is, and the next step; that of an
adapter depends on its kind."""


def foreign_file(place: Place) -> tuple[str, str] | None:
    """Return what a file of another program is, and a hint; None if its program is not known."""
    for magic, what, hint in FOREIGN:
        if place.head.startswith(magic):
            if what.startswith("packed"):
                return _packed(place, what, *hint.split())
            return what, hint
    if text_pickle(place.head):
        return "a bare pickle", _BARE
    if place.head[TAR_MAGIC:].startswith(b"ustar"):
        return "a tar archive", f"unpack it first: tar -xf {quote(place.path)}"
    if re.fullmatch(OTHER_FRAMEWORKS, Path(place.path).name):
        return "by its name a file of another framework", PYTORCH
    return None


def text_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle of protocol 0, which torch before 1.6 wrote too, with its magic number."""
    return TEXT_PICKLE.match(head) is not None


def _packed(place: Place, what: str, program: str, suffix: str) -> tuple[str, str]:
    """Return what a packed file is, and the command that unpacks it, whatever its name: NeMo's models are tar
    archives, packed or not."""
    path = place.path
    if PACKED_TAR.search(path) or _is_gzipped_tar(
        place.head
    ):  # tar finds out what it is packed with
        return f"a tar archive {what}", f"unpack it first: tar -xf {quote(path)}"
    if path.endswith(suffix):
        return what, f"unpack it first: {program} -k {quote(path)}"
    return what, f"unpack it first: {program} -c < {quote(path)} > {quote(path + '.unpacked')}"


def _is_gzipped_tar(head: bytes) -> bool:
    import zlib  # deferred: only what is refused needs it

    try:
        first = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, TAR_MAGIC + 5)
    except zlib.error:
        return False
    return first[TAR_MAGIC:] == b"ustar"


def mark_of(place: Place) -> tuple[str, str] | None:
    """Return what a directory is by the first pattern of MARKS that an entry matches, and a hint."""
    for pattern, what, hint in MARKS:
        if any(re.fullmatch(pattern, name) for name in place.names):
            return what, hint
    return None
