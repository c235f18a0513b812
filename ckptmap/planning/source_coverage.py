"""Prove, from headers alone, that the source holds every byte of the tensors that are converted.

The chunks of a tensor tile it exactly once, and each lies inside its file. What several ranks hold
alike is returned as comparisons, which the run makes while it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, le

from ckptmap.core.columns import by_object, distinct
from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.stored_parts import StoredTable
from ckptmap.core.tensor_columns import Extents, extents_of, nbytes_of
from ckptmap.core.tiling import prove_rows, prove_tiling
from ckptmap.core.weight_columns import WeightForm, WeightKind
from ckptmap.errors import SourceError
from ckptmap.planning.file_plan import Compare
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.tensors import Extent, StoredTensor, TensorInfo


@dataclass(frozen=True)
class SourceCoverage:
    """Checks stored tensors against the sizes of the source's files."""

    path: str
    fingerprints: Mapping[str, Fingerprint]
    _pieces: dict[int, StoredTensor] = field(default_factory=dict)
    """Tensors that others are pieced together of, by id: each is checked once."""
    _whole: dict[int, bool] = field(default_factory=dict)
    """Whether all tensors of a table lie inside their files, by the id of the table."""

    def prove_extents(
        self, fqns: Sequence[str], infos: Sequence[TensorInfo], extents: Extents
    ) -> None:
        """Raise SourceError CKM104 where one of these tensors ends behind its file."""
        if self._are_inside(infos, extents):
            return
        ends = map(add, extents.offsets, nbytes_of(infos))
        for fqn, file, end in zip(fqns, extents.files, ends, strict=True):
            self._require_inside(fqn, file, end)

    def _are_inside(self, infos: Sequence[TensorInfo], extents: Extents) -> bool:
        ends = map(add, extents.offsets, nbytes_of(infos))
        limit_of = {file: self.fingerprints[file].nbytes for file in {*extents.files}}
        return all(map(le, ends, map(limit_of.__getitem__, extents.files)))

    def _is_whole(self, stored: StoredTable) -> bool:
        """Return whether every stored tensor is one run of bytes inside its file, so that no part of a weight need be
        looked for."""
        if stored.extents is None:
            return False
        if id(stored) not in self._whole:
            self._whole[id(stored)] = self._are_inside(stored.infos, stored.extents)
        return self._whole[id(stored)]

    def prove_all(
        self,
        fqns: Sequence[str],
        kinds: Sequence[WeightKind],
        beneath: Callable[[str], Iterable[StoredTensor]],
    ) -> list[Compare]:
        """Return the comparisons of all parts of these weights; `beneath` returns the parts of one.

        Raises as `prove` does.
        """
        compares: list[Compare] = []
        forms = distinct(kinds).values()
        if all(isinstance(form, WeightForm) and self._is_whole(form.stored) for form in forms):
            return compares
        for form, numbers_of in by_object(kinds):
            alike = list(map(fqns.__getitem__, numbers_of))
            if isinstance(form, WeightForm):
                for numbers in form.part_numbers(alike):
                    infos = list(map(form.stored.infos.__getitem__, numbers))
                    tensors = map(form.stored.tensors.__getitem__, numbers)
                    compares += self._prove_column(
                        alike, infos, form.stored.extents_at(numbers), tensors
                    )
            else:
                for column in zip(*map(beneath, alike), strict=True):
                    infos = [stored.info for stored in column]
                    compares += self._prove_column(alike, infos, extents_of(column), column)
        return compares

    def _prove_column(
        self,
        fqns: Sequence[str],
        infos: Sequence[TensorInfo],
        extents: Extents | None,
        tensors: Iterable[StoredTensor],
    ) -> list[Compare]:
        """Return the comparisons of one part of each weight; `extents`: where they lie, if each is one run."""
        if extents is not None:
            self.prove_extents(fqns, infos, extents)
            return []
        return [
            compare
            for fqn, stored in zip(fqns, tensors, strict=True)
            for compare in self.prove(fqn, stored)
        ]

    def prove(self, fqn: str, stored: StoredTensor) -> list[Compare]:
        """Return the comparisons of the tensor's replicas with it.

        Raises SourceError CKM112 where its chunks do not tile it, CKM104 where one ends behind its
        file.
        """
        if isinstance(stored, Assembled):  # that its pieces tile it was proven when it was mapped
            return [compare for one in stored.sources for compare in self._prove_piece(fqn, one)]
        place = stored.place
        if type(place) is Extent and not stored.replicas:
            self._require_inside(fqn, place.file, place.offset + stored.info.nbytes)
            return []
        self._prove_tiling(fqn, stored)
        chunks = stored.replicas if type(place) is RowChunks else (*stored.chunks, *stored.replicas)
        for chunk in chunks:
            region = chunk.region
            self._require_inside(fqn, region.file, region.offset + region.span_nbytes)
        if type(place) is RowChunks:
            for file, end in place.ends():
                self._require_inside(fqn, file, end)
        return [Compare(fqn, stored, replica) for replica in stored.replicas]

    def _prove_piece(self, fqn: str, stored: StoredTensor) -> list[Compare]:
        if id(stored) in self._pieces:
            return []
        self._pieces[id(stored)] = stored
        return self.prove(fqn, stored)

    def _prove_tiling(self, fqn: str, stored: StoredTensor) -> None:
        shape, place = stored.info.shape, stored.place
        if type(place) is RowChunks:
            wrong = prove_rows(shape, tuple(place.bounds))
        else:
            wrong = prove_tiling(shape, [chunk.box for chunk in stored.chunks])
        if wrong is not None:
            raise SourceError(
                "CKM112", f"{self.path}: {fqn}: {wrong}, expected to fill {stored.info}",
                "a rank's file may be missing or from another run; save it again",
            )  # fmt: skip

    def _require_inside(self, fqn: str, file: str, end: int) -> None:
        limit = self.fingerprints[file].nbytes
        if end > limit:
            raise SourceError(
                "CKM104",
                f"{file}: {fqn} ends at byte {end}, the file at {limit}",
                "it is truncated; copy it again",
            )
