"""One safetensors file: its header is the whole index."""

from __future__ import annotations

from pathlib import Path as FilePath

from ckptmap.core.gc_pause import paused_gc
from ckptmap.formats.safetensors.file import looks_like_safetensors, records_of, stored_tensors
from ckptmap.formats.safetensors.header import parse
from ckptmap.formats.safetensors.torchao_metadata import by_stored_name
from ckptmap.protocols import Index, Place
from ckptmap.storage.files import Files


class SafetensorsFile:
    """Reads one `.safetensors` file of any name; every name in it is one path segment."""

    name = "safetensors"

    def claims(self, place: Place) -> bool:
        """8 bytes of length, then `{`, whatever the file is called."""
        return not place.is_dir and looks_like_safetensors(place.head)

    def index(self, place: Place) -> Index:
        """Raises SourceError CKM104 or CKM107, and CKM115 for malformed records."""
        file = str(FilePath(place.path).absolute())
        files = Files()
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
