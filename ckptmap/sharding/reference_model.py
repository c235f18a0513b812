"""The tensors of a reference model: names, shapes and order, from a checkpoint or a config.json.

FSDP1's flat parameters store the elements of many tensors without shapes. The reference model
(`--like`) tells which tensors they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Protocol

from ckptmap import registry
from ckptmap.core.state_paths import role_and_fqn
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import Leaf, Path

if TYPE_CHECKING:
    from torch import nn

CONFIG = "config.json"


@dataclass(frozen=True)
class Like:
    """The tensors of a reference model by plain FQN, buffers included.

    name     the path that the reference was read from, for errors
    shapes   the shape of each tensor, in the order of the model's modules
    ordered  the names whose order is known; None: all
    ties     FQN -> the earlier FQN whose values it shares, as far as the source states it
    equal    returns whether two tensors hold the same bytes; None: the reference has no values
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    ordered: Collection[str] | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    equal: Callable[[str, str], bool] | None = None

    def in_order(self, names: Collection[str]) -> bool:
        """Return whether the order of these tensors in the model is known."""
        return self.ordered is None or all(name in self.ordered for name in names)


Plain = Callable[[Collection[str]], Mapping[str, str]]
"""A function that maps keys to their plain FQNs, without the segments that wrappers add."""

Units = Mapping[Path, Sequence[str]]
"""Path of a dict of weights -> the modules in it that FSDP1 wraps; the form of `Index.units`."""


class Unflattener(Protocol):
    """Splits the flat tensors that one way of saving makes; it receives all leaves at once."""

    name: str

    def unflatten(
        self,
        leaves: Mapping[Path, Leaf],
        like: Callable[[], Like] | None,
        plain: Plain,
        where: str,
        units: Units,
    ) -> Mapping[Path, Leaf]:
        """Return the leaves with each flat tensor replaced by the tensors in it.

        Without a flat tensor the same leaves are returned, and `like` is not called. Raises
        SourceError CKM112 if `like` is needed and missing, or of another model.
        """


def unflatteners() -> tuple[Unflattener, ...]:
    """Return every registered unflattener, in the order in which they are applied."""
    return registry.unflatteners()


def is_alphabetical(names: Sequence[str], dtypes: Sequence[str]) -> bool:
    """Return whether the names of each dtype are sorted.

    A safetensors file sorts its tensors, whatever the order of the model, and a checkpoint that was
    converted from one keeps that order: so sorted names do not tell the order of the model.
    """
    by_dtype: dict[str, list[str]] = {}
    for name, dtype in zip(names, dtypes, strict=True):
        by_dtype.setdefault(dtype, []).append(name)
    return all(_is_sorted(group) for group in by_dtype.values())


def _is_sorted(names: Sequence[str]) -> bool:
    natural = sorted(names, key=lambda name: [_natural(part) for part in name.split(".")])
    return list(names) in (sorted(names), natural)


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


MANIFEST = "ckptmap.manifest.json"


def like_manifest(manifest: FilePath, mounts: Mounts) -> Like:
    """Return the tensors that a manifest of ckptmap lists, in their order.

    Raises SourceError CKM403 if it cannot be read or lists none.
    """
    try:
        document = read_json(manifest, mounts)
        shapes = {
            fqn: tuple(map(int, about["shape"]))
            for key, about in document["logical"].items()
            for role, fqn in [role_and_fqn(key)]
            if role == "model"
        }
        ties = {
            str(fqn): str(earlier) for fqn, earlier in document["tied"].items() if earlier in shapes
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(
            "CKM403",
            f"{manifest}: does not list what was written: {type(error).__name__}",
            "give --like PATH: a checkpoint or config.json of the same model",
        ) from error
    return Like(str(manifest), shapes, ties=ties)


def like_config(config: FilePath, mounts: Mounts) -> Like:
    """Return the tensors of the transformers model that a config.json describes.

    The model is built on the meta device, from a class of the installed transformers, never from
    code that lies beside the config. Raises SourceError CKM101 if there is no such class, or if
    transformers is not installed.
    """
    from ckptmap.sharding.transformers_meta_model import on_meta

    model = on_meta(config, mounts)
    return _of_module(model, str(config))


def _of_module(model: nn.Module, name: str) -> Like:
    """Return the tensors of a module's state dict in order; a parameter with two names is a tie."""
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        shapes[key] = tuple(tensor.shape)
        if first.setdefault(id(tensor), key) != key:
            ties[key] = first[id(tensor)]
    return Like(name, shapes, ties=ties)
