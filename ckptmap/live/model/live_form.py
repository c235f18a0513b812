"""The class of tensor that holds a weight in a live model, and what a load and a save do with it.

A dense weight is one tensor. A quantized weight is an object of a library, torchao's NF4Tensor for
one, that keeps codes and scales. A `LiveForm` describes one such class; the registry lists them, and
everything else asks a form instead of naming the class.

    target, source  ->  form.step(...)    how the checkpoint's tensor gets into the model
    target          ->  form.stored(...)  the plain tensors that a checkpoint keeps of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap import registry
from ckptmap.live.options import LoadOptions
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE

if TYPE_CHECKING:
    import torch

    from ckptmap.live.model.live_tensor import LiveTensor
    from ckptmap.live.model.load_report import CastTensor, Decoded, Encoded
    from ckptmap.live.model.tensor_reader import TensorReader
    from ckptmap.storage.lazy_tensor import LazyTensor
    from ckptmap.tensors import Box, TensorInfo

DENSE_CLASSES = frozenset({"Tensor", "Parameter", "Buffer", "DTensor", *TRAINED_DENSE})
"""Classes whose values are written as those of any tensor."""


@dataclass(frozen=True)
class LoadContext:
    """What a form may know of a load beside the tensor.

    options   the caller's options
    fallback  where tensors go that are on meta and on no mesh
    """

    options: LoadOptions
    fallback: torch.device


@dataclass(frozen=True)
class LoadStep:
    """How one tensor of the model is filled, and what the report says about it.

    run        fills the tensor, or replaces it
    quantizes  True: the checkpoint's values are quantized here
    becomes    (class, dtype) of the local tensor that replaces the present one; None: it stays
    """

    run: Callable[[TensorReader], None]
    cast: CastTensor | None = None
    encoded: Encoded | None = None
    decoded: Decoded | None = None
    quantizes: bool = False
    becomes: tuple[str, str] | None = None


@dataclass(frozen=True)
class Decode:
    """A form cannot hold the weight here, so that it is decoded into a dense tensor."""

    reason: str


@dataclass(frozen=True)
class NeedsFrozen:
    """A form holds frozen weights alone, and the live one requires gradients.

    title  the form's name in an error text
    """

    title: str


@dataclass(frozen=True, eq=False)
class StoredPart:
    """The box of one stored tensor that this rank holds, as part of a quantized weight.

    key         name of the stored tensor
    info        shape and dtype of the whole stored tensor
    everywhere  True: every rank holds all of it, with the same values
    """

    key: str
    info: TensorInfo
    box: Box
    values: torch.Tensor
    everywhere: bool


@dataclass(frozen=True, eq=False)
class StoredForm:
    """A quantized weight as a checkpoint keeps it: plain tensors, and the record of their scheme."""

    parts: Sequence[StoredPart]
    record: Mapping[str, object] | None = None


class LiveForm:
    """A class of live tensors that hold quantized weights. The defaults are those of most forms."""

    scheme: str = ""
    """The suffix of the scheme that `quantized` quantizes by; empty: the form cannot."""
    classes: frozenset[str] = frozenset()
    """Names of the classes of live tensors."""
    takes_values: bool = False
    """Can dense values be copied into the live tensor?"""
    kept_by_state_dict: bool = True
    """Does a state dict in memory keep the codes? If not, the weight passes as a dense one."""
    has_values_on_meta: bool = True
    """Can the weight be made from one on meta?"""

    def is_live(self, target: LiveTensor) -> bool:
        """Return whether this rank's part of the weight is a tensor of this form."""
        return type(target.local).__name__ in self.classes

    # ------------------------------------------------------------------ into the model

    def step(
        self, target: LiveTensor, source: LazyTensor, context: LoadContext
    ) -> LoadStep | Decode | NeedsFrozen | None:
        """Return how `source` gets into `target`; None: neither is of this form."""
        raise NotImplementedError

    def overwrite(self, reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
        """Write `source` into the live tensor, which stays the object that it is.

        Only for forms whose `takes_values` is False. Raises LoadError CKM504 where the blocks of
        scales do not fit.
        """
        raise NotImplementedError

    def quantized(
        self, reader: TensorReader, source: LazyTensor, target: LiveTensor
    ) -> torch.Tensor | None:
        """Return the values of `source` by `scheme`, in the form's class; None: the shape does not
        allow it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what a step reads

    def decides_by(self, source: LazyTensor) -> Iterable[str]:
        """Return the names of the parts of `source` whose values `step` reads to decide."""
        return ()

    def reads_own_scales(self, source: LazyTensor) -> bool:
        """Return whether a rank reads only its own rows' scales of `source`, not all of them."""
        return False

    def reads_whole(self, source: LazyTensor) -> bool:
        """Return whether a rank reads all of `source`, however little of it the rank holds."""
        return False

    # ------------------------------------------------------------------ out of the model

    def stored(self, target: LiveTensor, fqn: str) -> StoredForm | None:
        """Return the stored tensors of a live weight that is named `fqn`, not copied; None: it is
        stored as a dense tensor. Raises LoadError CKM505 where it cannot be stored."""
        return None

    def logical(self, target: LiveTensor) -> TensorInfo | None:
        """Return shape and dtype of the weight that the live codes stand for; None: those of the
        live tensor."""
        return None

    def has_rounded_scales(self, target: LiveTensor) -> bool:
        """Return whether the library has rounded the scales since they were loaded."""
        return False

    def require_in_state_dict(self, target: LiveTensor) -> None:
        """Raise LoadError CKM505 where no state dict can hold such a weight."""


def live_forms() -> tuple[LiveForm, ...]:
    """Return all forms, in the order in which a load asks them."""
    return registry.live_forms()


def form_of(target: LiveTensor) -> LiveForm | None:
    """Return the form of a live tensor; None: it is dense."""
    return next((form for form in live_forms() if form.is_live(target)), None)


def is_quantized(target: LiveTensor) -> bool:
    """Return whether the live tensor holds codes that no dense values can be copied into."""
    form = form_of(target)
    return form is not None and not form.takes_values


def logical_info(target: LiveTensor) -> TensorInfo | None:
    """Return shape and dtype of the weight that live codes stand for, where the live tensor's own
    are others."""
    return next((info for form in live_forms() if (info := form.logical(target))), None)


def stored_form(target: LiveTensor, fqn: str) -> StoredForm | None:
    """Return the stored tensors of a quantized weight; None: it is stored as a dense tensor."""
    return next((kept for form in live_forms() if (kept := form.stored(target, fqn))), None)


def is_loadable(kind: str) -> bool:
    """Return whether a load can fill or replace a live tensor of the class `kind`."""
    return kind in DENSE_CLASSES or kind in quantized_classes()


def quantized_classes() -> list[str]:
    """Return the names of the classes of all forms, sorted."""
    return sorted({name for form in live_forms() for name in form.classes})
