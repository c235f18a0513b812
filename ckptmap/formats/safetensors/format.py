"""Open one safetensors file as a checkpoint. Its header holds name, shape, dtype and byte range of every
tensor, so nothing else is read.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

from pathlib import Path as FilePath

from ckptmap.core.gc_pause import paused_gc
from ckptmap.formats.safetensors.file import looks_like_safetensors, records_of, stored_tensors
from ckptmap.formats.safetensors.header import parse
from ckptmap.formats.safetensors.torchao_metadata import by_stored_name
from ckptmap.protocols import Index, Place
from ckptmap.storage.files import Files


class SafetensorsFile:
    """Reads one `.safetensors` file, whatever its name. A tensor's name is a path of one segment."""

    name = "safetensors"

    def claims(self, place: Place) -> bool:
        """Return True for a file that begins with 8 bytes of header length and a `{`."""
        return not place.is_dir and looks_like_safetensors(place.head)

    def index(self, place: Place) -> Index:
        """Return all tensors of the file, and the encoding records of its `__metadata__`.

        Raise SourceError CKM101 if it cannot be read, CKM104 if it is truncated, CKM107 for a malformed
        header, CKM115 for malformed encoding records.
        """
        file = str(FilePath(place.path).absolute())
        files = Files(mounts=place.mounts)
        try:
            return self._index(files, file)
        finally:
            files.close()

    def _index(self, files: Files, file: str) -> Index:
        with paused_gc():
            header = parse(files, file)
            leaves = stored_tensors([header], [file])
        return Index(
            self.name,
            leaves,
            (file,),
            records=by_stored_name(records_of(header, file), header.keys),
        )
