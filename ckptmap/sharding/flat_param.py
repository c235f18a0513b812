"""Read FSDP1's LOCAL_STATE_DICT: one flat tensor of parameters for each FSDP unit, cut over ranks.

    N x ShardedTensor{`layers.0._flat_param` [ceil(numel / N)]} -> layers.0.*: [rows, cols], ...

By torch/distributed/fsdp/_flat_param.py, a flat tensor is the concatenation of the unit's
parameters, in the order of its modules, without those of the units inside it; a shared parameter is
in it once. With `use_orig_params=False` the parameters follow each other without padding, and the
file does not name them. With `use_orig_params=True` padding (of value 42) aligns each of them to 16
bytes of the compute dtype, and each is in the file by name as well: as the 1-D slice that the rank
holds, which may be empty. Neither form stores shapes: they come from a reference model (`--like`).

A DCP directory of such state dicts holds each flat tensor whole. Of the slices, which all ranks save
under one name, it holds that of one rank: `flat_slices` reads those parameters from the flat tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ckptmap.core.state_paths import by_rank
from ckptmap.errors import SourceError
from ckptmap.sharding.flat_range_boxes import Slices
from ckptmap.sharding.flat_slices import UnitMember, place
from ckptmap.sharding.flat_unit import StoredUnit, chunks_of, is_flat, runs_of, unit_of
from ckptmap.sharding.reference_model import Like, Plain, Units
from ckptmap.tensors import Leaf, Path, StoredTensor, TensorInfo


class FlatParams:
    """The unflattener of model weights: replaces flat parameters by the parameters in them."""

    name = "flat-param"

    def unflatten(
        self,
        leaves: Mapping[Path, Leaf],
        like: Callable[[], Like] | None,
        plain: Plain,
        where: str,
        units: Units,
    ) -> Mapping[Path, Leaf]:
        """Return the leaves, with the flat parameters of each dict replaced by their parameters.

        Optimizer state is left as it is. Raises SourceError CKM112 if there is a flat parameter and
        `like` is None or of another model, CKM110 if shards are missing.
        """
        roots = dict.fromkeys(path[:-1] for path, leaf in leaves.items() if is_flat(path, leaf))
        if not roots:
            return leaves
        result = dict(leaves)
        for root in roots:
            leaves_of_root = {
                str(path[-1]): leaf for path, leaf in leaves.items() if path[:-1] == root
            }
            parameters = _StateDict(leaves_of_root, like, plain, where).unflatten()
            result = {path: leaf for path, leaf in result.items() if path[:-1] != root}
            result.update({(*root, key): leaf for key, leaf in parameters.items()})
        return result


class _StateDict:
    """One state dict that holds flat parameters: its leaves by key."""

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        like: Callable[[], Like] | None,
        plain: Plain,
        where: str,
    ) -> None:
        self.leaves = leaves
        self.where = where
        if like is None:
            raise SourceError(
                "CKM112",
                f"{where}: holds flat shards of FSDP1 (LOCAL_STATE_DICT), which carry no shapes",
                "give --like PATH: a checkpoint or config.json of the same model",
            )
        self.like = like()
        self.plain = plain(leaves)
        self.units = [
            unit_of(key, self.plain[key], leaf)
            for key, leaf in leaves.items()
            if is_flat((key,), leaf)
        ]

    def unflatten(self) -> dict[str, Leaf]:
        """Return every leaf by key.

        Slices of a named parameter are joined. Parameters that only a flat tensor holds take the
        place of that flat tensor in the order of keys.
        """
        by_key: dict[str, dict[str, Leaf]] = {key: {} for key in self.leaves}
        named_units: set[str] = set()
        sliced: dict[str, list[str]] = {}
        for key, leaf in self.leaves.items():
            if is_flat((key,), leaf):
                continue
            unit = self._unit_of(self.plain[key])
            if unit is not None and unit.joined:
                if self._is_slice(key, leaf):
                    sliced.setdefault(unit.stored, []).append(key)
                else:
                    by_key[key][key] = leaf
                continue
            slices = self._slices(key, leaf)
            if slices is not None and unit is not None:
                named_units.add(unit.stored)
                leaf = self._join_slices(key, slices)
            by_key[key][key] = leaf
        present = {self.plain[key] for key, leaf in by_key.items() if leaf}
        missing = [fqn for fqn in self.like.shapes if fqn not in present]
        for unit in self.units:
            names_of_unit = [fqn for fqn in missing if self._unit_of(fqn) is unit]
            if unit.stored in sliced:
                of_unit = [fqn for fqn in self.like.shapes if self._unit_of(fqn) is unit]
                for key, leaf in self._joined_slices(unit, sliced[unit.stored], of_unit).items():
                    by_key[key] = {key: leaf}
            elif unit.stored not in named_units and (names_of_unit or not unit.joined):
                by_key[unit.stored] = self._parameters(unit, names_of_unit)
        result = {key: leaf for part in by_key.values() for key, leaf in part.items()}
        self._check_all(result)
        return result

    def _unit_of(self, fqn: str) -> StoredUnit | None:
        """Return the innermost unit that a parameter name belongs to; None if it is in no unit."""
        enclosing = [unit for unit in self.units if fqn.startswith(unit.prefix)]
        return max(enclosing, key=lambda unit: len(unit.prefix), default=None)

    # ------------------------------------------------------------- use_orig_params=True

    def _slices(self, key: str, leaf: Leaf) -> list[StoredTensor] | None:
        """Return a parameter's slices in rank order; None if the leaf is whole on every rank."""
        values = [value for value in by_rank(leaf) if isinstance(value, StoredTensor)]
        if len(values) != len(by_rank(leaf)) or any(len(v.info.shape) != 1 for v in values):
            return None
        shape = self.like.shapes.get(self.plain[key])
        if shape is None:
            if len({value.info for value in values}) == 1 and not self._is_in_unit(values):
                return None  # a buffer that the reference model does not list
            raise SourceError(
                "CKM112",
                f"{self.where}: {key} is cut into flat slices, and {self.like.name} does not have it",
                "give --like PATH: a checkpoint or config.json of the same model",
            )
        numels = [value.info.numel for value in values]
        whole = all(value.info.shape == shape for value in values)
        return None if whole and sum(numels) != math.prod(shape) else values

    def _is_in_unit(self, values: Sequence[StoredTensor]) -> bool:
        """Return whether any of the values lies inside the bytes of a flat parameter."""
        regions = [chunk.region for value in values if value.info.numel for chunk in value.chunks]
        return any(
            run.region.file == region.file
            and run.region.offset <= region.offset < run.region.offset + run.region.nbytes
            for unit in self.units
            for run in unit.runs
            for region in regions
        )

    def _join_slices(self, key: str, slices: Sequence[StoredTensor]) -> StoredTensor:
        """Return the tensor whose row-major elements are the slices: [n0], [n1], ... -> shape.

        Raises SourceError CKM112 if their number or dtype does not fit the shape.
        """
        shape = self.like.shapes[self.plain[key]]
        numel = sum(part.info.numel for part in slices)
        dtypes = {part.info.dtype for part in slices}
        if numel != math.prod(shape) or len(dtypes) > 1:
            raise SourceError(
                "CKM112",
                f"{self.where}: {key}: the ranks hold {numel} elements of "
                f"{' and '.join(sorted(dtypes))}, expected {math.prod(shape)} for the shape "
                f"{list(shape)} of {self.like.name}",
                "a rank's file is of another save, or --like is of another model",
            )
        info = TensorInfo(shape, slices[0].info.dtype)
        share = Slices(tuple(part.share for part in slices), tuple(p.info.numel for p in slices))
        return StoredTensor(info, lambda: list(chunks_of(info, runs_of(slices), 0)), share=share)

    # ------------------------------------------------------------- use_orig_params=True, in DCP

    def _is_slice(self, key: str, leaf: Leaf) -> bool:
        """Return whether a tensor is one rank's slice of a parameter of the reference model."""
        shape = self.like.shapes.get(self.plain[key])
        return isinstance(leaf, StoredTensor) and shape is not None and leaf.info.shape != shape

    def _joined_slices(
        self, unit: StoredUnit, keys: Sequence[str], of_unit: Sequence[str]
    ) -> dict[str, Leaf]:
        """Return the parameters of a unit that the file holds one rank's slices of, by key.

        Raises SourceError CKM112 if the reference model does not place them in one way.
        """
        shapes = self.like.shapes
        cut = {self.plain[key]: key for key in keys}
        whole = {
            self.plain[key]
            for key, leaf in self.leaves.items()
            if isinstance(leaf, StoredTensor) and leaf.info.dtype == unit.info.dtype
        }
        members = [
            UnitMember(fqn, math.prod(shapes[fqn]), is_cut=fqn in cut)
            for fqn in of_unit
            if fqn in cut or fqn in whole
        ]
        pairs = [self._equal_pair([*cut], numel) for numel in {math.prod(shapes[f]) for f in cut}]
        found = (place(unit, members, ties) for ties in (self.like.ties, *filter(None, pairs)))
        offsets = next(filter(None, found), None)
        if offsets is None or not self.like.in_order([member.fqn for member in members]):
            raise SourceError(
                "CKM112",
                f"{self.where}: {unit.stored} holds {unit.info.numel} elements, and {self.like.name} does"
                f" not tell at which of them {keys[0]} begins",
                "give --like PATH: a config.json, or a file that torch.save(model.state_dict(), PATH) wrote",
            )
        return {key: unit.parameter(shapes[fqn], offsets[fqn]) for fqn, key in cut.items()}

    # ------------------------------------------------------------- use_orig_params=False

    def _parameters(self, unit: StoredUnit, names: Sequence[str]) -> dict[str, Leaf]:
        """Return the parameters of a unit by name, in the model's order.

        Tied parameters are one object. Raises SourceError CKM112 if the names do not fill the unit,
        or if the reference model does not tell their order.
        """
        names, ties = self._names_that_fill(unit, names)
        if len(names) > 1 and not self.like.in_order(names):
            raise SourceError(
                "CKM112",
                f"{self.where}: {unit.stored} holds {len(names)} tensors in the model's order, "
                f"{self.like.name} lists them in an order that may be another",
                "give --like PATH: a config.json, or a file that torch.save(model.state_dict(), PATH) wrote",
            )
        result: dict[str, StoredTensor] = {}
        offset = 0
        for fqn in names:
            result[fqn] = unit.parameter(self.like.shapes[fqn], offset)
            offset += result[fqn].info.numel
        return {**result, **{fqn: result[earlier] for fqn, earlier in ties.items()}}

    def _names_that_fill(
        self, unit: StoredUnit, names: Sequence[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the names that fill the unit, each storage once, and the names tied to those.

        Raises SourceError CKM112 if no choice of ties gives the unit's number of elements.
        """
        shapes = self.like.shapes
        ties = {
            fqn: earlier
            for fqn, earlier in self.like.ties.items()
            if fqn in names and earlier in names
        }
        excess = sum(math.prod(shapes[fqn]) for fqn in names) - unit.info.numel
        for tied in ({}, ties, self._equal_pair(names, excess)):
            if sum(math.prod(shapes[fqn]) for fqn in tied) == excess:
                return [fqn for fqn in names if fqn not in tied], tied
        first_names = ", ".join(names[:3]) or "none"
        if len(names) > 3:
            first_names += ", ..."
        raise SourceError(
            "CKM112",
            f"{self.where}: {unit.stored} holds {unit.info.numel} elements, the tensors of "
            f"{self.like.name} that belong there {unit.info.numel + excess}: {first_names}",
            "give --like PATH: a checkpoint or config.json of the same model",
        )

    def _equal_pair(self, names: Sequence[str], excess: int) -> dict[str, str]:
        """Return the one surplus name and the name that it is tied to; empty if they are not clear.

        A container that writes tied tensors twice does not state the tie. So a pair counts as tied
        if it is the only one with `excess` elements and one shape, and if both have equal bytes in
        the reference checkpoint.
        """
        shapes, equal = self.like.shapes, self.like.equal
        pairs = [
            (fqn, earlier)
            for index, fqn in enumerate(names)
            if math.prod(shapes[fqn]) == excess > 0
            for earlier in names[:index]
            if shapes[earlier] == shapes[fqn]
        ]
        if len(pairs) != 1 or equal is None or not equal(*pairs[0]):
            return {}
        return dict(pairs)

    def _check_all(self, result: Mapping[str, Leaf]) -> None:
        """Raise SourceError CKM112 if a tensor of the reference model is missing from the result.

        A file that lacks a whole unit is found in this way.
        """
        known = {*result, *(self.plain[key] for key in result if key in self.plain)}
        missing = [
            f for f in self.like.shapes if f not in known and self.like.ties.get(f) not in known
        ]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise SourceError(
                "CKM112",
                f"{self.where}: {missing[0]} of {self.like.name} is in none of its flat parameters{more}",
                "give --like PATH: a checkpoint or config.json of the same model",
            )
