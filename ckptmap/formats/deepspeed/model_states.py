"""Read the file of the model: names and shapes, buffers, frozen and shared weights, the user's own values.

    module                  FQN -> the 16-bit copy; under stage 3 an empty placeholder, but for buffers
    param_shapes            for each flat vector: FQN -> shape, in the order of the vector
    frozen_param_fragments  FQN -> the weight; under stage 3 the rank's share of it
    frozen_param_shapes     FQN -> shape
    shared_params           FQN -> the FQN of the weight that it is, too
    lr_scheduler global_steps ds_config ...    and what the user gave as client_state

Stage 1 has no frozen fragments: `module` holds those weights. Source: deepspeed 0.19.8,
runtime/engine.py (`_common_checkpoint_state`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.flat_vectors import FlatParameter, over_ranks
from ckptmap.formats.deepspeed.pickled import Pickled
from ckptmap.formats.deepspeed.step_files import ONE_SAVE
from ckptmap.tensors import Leaf, Path, StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
_OF_WEIGHTS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
})  # fmt: skip
_OF_RUN = frozenset({
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info",
})  # fmt: skip
"""What DeepSpeed notes of its own run."""
ROOT = "module"
"""The dict of the weights, as DeepSpeed calls it."""
EXTRA = ("extra",)
OWN = (*EXTRA, "deepspeed")
"""Where the user's values lie among the leaves, and those of DeepSpeed's own run."""


@dataclass(frozen=True)
class ModelStates:
    """The model by the file of rank 0, and what the other ranks' files add under stage 3.

    ranks     the files of all ranks; one file: all ranks share it
    module    FQN -> copy or placeholder, in the order of the model
    trained   for each flat vector: FQN -> shape
    shared    FQN -> the FQN whose weight it is
    """

    ranks: Sequence[Pickled]
    module: Mapping[str, Leaf]
    trained: Sequence[Shapes]
    shared: Mapping[str, str]

    @classmethod
    def of(cls, ranks: Sequence[Pickled]) -> ModelStates:
        """Return the model. Raise SourceError CKM110 if the ranks' files are of different saves, CKM106
        for values that DeepSpeed does not write."""
        first = ranks[0]
        trained = _shapes_of_vectors(first)
        for other in ranks[1:]:
            if _shapes_of_vectors(other) != trained:
                raise _other_save(first, other, "has other parameters")
            for key in ("global_steps", "dp_world_size"):
                if first.tree.get(key) != other.tree.get(key):
                    raise _other_save(first, other, f"has {key} {other.tree.get(key)!r:.40}")
        module = {str(name): leaf for name, leaf in first.mapping(ROOT).items()}
        shared = {str(k): str(v) for k, v in first.mapping("shared_params").items()}
        if first.tree.get("shared_params") is None:
            shared = _shared_storages(module, trained)
        return cls(ranks, module, trained, shared)

    @classmethod
    def joined(cls, files: Sequence[Pickled]) -> ModelStates:
        """Return the model of a universal checkpoint: its files may be of ranks of tensor parallelism, which
        list the same parameters. Raise SourceError CKM118 if the files hold parts of others."""
        if "zero_pp_rank_" in files[0].name:
            return cls.of(files)
        model = cls.of(files[:1])
        names = {name for shapes in model.trained for name in shapes}
        others = [n for n in model.module if n not in names and model.shared.get(n) not in names]
        if len(files) > 1 and others:
            raise SourceError(
                "CKM118",
                f"{files[0].file}: {others[0]}: was not trained, and ds_to_universal joins no such weights of"
                f" {len(files)} ranks of tensor parallelism",
                "convert the model of a run without tensor parallelism",
            )
        if len(files) > 1:  # its weights are parts
            return cls(model.ranks, dict.fromkeys(model.module), model.trained, model.shared)
        return model

    @property
    def of_ranks(self) -> bool:
        """Whether each rank has a file of its own: under stage 3."""
        return len(self.ranks) > 1 or "zero_pp_rank_" in self.ranks[0].name

    @property
    def world(self) -> int:
        """Return the number of ranks of data parallelism; 0: the file does not tell."""
        world = self.ranks[0].tree.get("dp_world_size")
        return world if type(world) is int else 0

    def weights(self, trained: Mapping[str, StoredTensor], where: str) -> dict[Path, Leaf]:
        """Return every weight and buffer in the order of the model; `trained` are those of the optimizer.

        Raise SourceError CKM110 for a weight of which no file holds the values.
        """
        frozen = self._frozen()
        leaves: dict[Path, Leaf] = {}
        for name in dict.fromkeys((*self.module, *trained, *frozen)):
            copy = self.module.get(name)
            own = trained.get(name) or frozen.get(name)
            owner = self.shared.get(name, "")
            leaf: Leaf = own or trained.get(owner) or frozen.get(owner) or copy
            if own is not None and isinstance(copy, StoredTensor):
                leaf = self._with_copy(name, own, copy)
            if self._is_placeholder(name, leaf):
                raise SourceError(
                    "CKM110",
                    f"{where}: {name}: no file of a rank holds its values, only an empty placeholder",
                    "save the checkpoint again, with the frozen weights or without them",
                )
            leaves[ROOT, name] = leaf
        return leaves

    def copies(self, trained: Mapping[str, StoredTensor]) -> dict[str, int]:
        """Return dtype -> how many copies of the optimizer's weights `module` holds in another dtype."""
        found: dict[str, int] = {}
        for name, weight in trained.items():
            copy = self.module.get(name)
            dtype = copy.info.dtype if isinstance(copy, StoredTensor) and copy.info.numel else ""
            if dtype not in ("", weight.info.dtype):
                found[dtype] = found.get(dtype, 0) + 1
        return found

    def extra(self) -> dict[Path, Leaf]:
        """Return the values beside the weights as leaves, but for those that are None."""
        first, leaves = self.ranks[0], {}
        for key, value in first.tree.items():
            if key not in _OF_WEIGHTS and value is not None:
                path = (*(OWN if key in _OF_RUN else EXTRA), key)
                below = flatten(value, first.file, first.nbytes)
                leaves.update({(*path, *rest): leaf for rest, leaf in below.items()})
        return leaves

    def _with_copy(self, name: str, weight: StoredTensor, copy: StoredTensor) -> StoredTensor:
        """Return the weight, with its copy in `module` as a replica where both are of one dtype."""
        if self.of_ranks:
            return weight
        if copy.info.shape != weight.info.shape:
            raise SourceError(
                "CKM110",
                f"{self.ranks[0].file}: {name}: is {copy.info}, expected the shape"
                f" {list(weight.info.shape)} of param_shapes",
                ONE_SAVE,
            )
        if copy.info != weight.info or not copy.info.numel:
            return weight
        return StoredTensor(weight.info, lambda: weight.chunks, copy.chunks, share=weight.share)

    def _is_placeholder(self, name: str, leaf: Leaf) -> bool:
        if not self.of_ranks or not isinstance(leaf, StoredTensor) or leaf.info.shape != (0,):
            return False
        return name in self.module and leaf is self.module[name] and name not in self._buffers

    @property
    def _buffers(self) -> Sequence[object]:
        return self.ranks[0].sequence("buffer_names")

    def _frozen(self) -> dict[str, StoredTensor]:
        """Return the frozen weights that have a place of their own."""
        key = "frozen_param_fragments"
        fragments = [rank.mapping(key) for rank in self.ranks]
        shapes = self.ranks[0].mapping("frozen_param_shapes")
        found = {}
        for name, values in fragments[0].items():
            shape = self.ranks[0].shape(shapes.get(name), "frozen_param_shapes")
            held = [rank.get(name) for rank in fragments]
            parts = [part for part in held if isinstance(part, StoredTensor)]
            if len(parts) < len(held):
                self.ranks[0].malformed(key, "tensors on every rank")
            if not self.of_ranks:
                found[name] = values
                continue
            pieces = tuple(over_ranks(0, math.prod(shape), len(parts)))
            for piece in pieces:
                part = parts[piece.rank]
                if part.info.numel < piece.numel or len(part.info.shape) != 1:
                    raise _other_save(
                        self.ranks[0],
                        self.ranks[piece.rank],
                        f"holds {part.info.numel} elements of {name}, expected {piece.numel}",
                    )
            found[name] = FlatParameter(name, shape, 0, pieces).tensor(parts)
        return found


def _shared_storages(module: Mapping[str, Leaf], trained: Sequence[Shapes]) -> dict[str, str]:
    """Return `shared_params` of versions that do not write it: copies that lie in one storage are of one weight."""
    owner_of = {
        copy.share: name
        for shapes in trained
        for name in shapes
        if isinstance(copy := module.get(name), StoredTensor) and copy.info.numel
    }
    return {
        name: owner_of[copy.share]
        for name, copy in module.items()
        if isinstance(copy, StoredTensor) and owner_of.get(copy.share, name) != name
    }


def _shapes_of_vectors(states: Pickled) -> list[Shapes]:
    key = "param_shapes"
    return [
        {str(name): states.shape(shape, key) for name, shape in group.items()}
        for group in states.mappings(key)
    ]


def _other_save(first: Pickled, other: Pickled, problem: str) -> SourceError:
    return SourceError(
        "CKM110",
        f"{other.file}: {problem}, unlike {first.name}: the two are of different saves",
        ONE_SAVE,
    )
