"""accelerate: `load_state` takes a checkpoint of any setup, `save_state` writes plain names.

    handle = ckptmap.integrations.accelerate.install(accelerator)     # after prepare()
    accelerator.load_state("runs/step-2000")                          # FSDP, DDP, compiled, Trainer's

accelerate's own FSDP loader reads only the names and shards of its own setup. FSDP2 with compiled
layers under activation checkpointing writes `_orig_mod.` into names. accelerate goes on loading
schedulers, random states, samplers and custom objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.checkpoint.open import open_as
from ckptmap.core.sizes import Size
from ckptmap.integrations.accelerate_several import Accelerator, NumberedStates, Prepared, prepared
from ckptmap.live.load.load import load
from ckptmap.live.options import MAX_MEMORY, LoadKeywords
from ckptmap.live.state_dict.handle import Handle
from ckptmap.live.state_dict.hooks import name_by_live
from ckptmap.mapping.wrappers import strip_wrappers

__all__ = ["install"]  # fmt: skip

WHERE = "accelerate"
OWN = "random_states_*.pkl"
"""Files in every directory of accelerate's, beside the model."""


def install(
    accelerator: Accelerator,
    *,
    strict: bool = True,
    precision: str = "keep",
    max_memory: Size = MAX_MEMORY,
) -> Handle:
    """Load models and optimizers for `accelerator.load_state`, and write plain names in `save_state`,
    until `remove()` of the handle. Call it after `prepare()`.

    Registers a save and a load pre-hook. The report of a load is `handle.reports["model"]`; several
    models have `"model"`, `"model_1"`, as accelerate names them, each with the optimizer of its
    parameters. `strict`, `precision` and `max_memory` are those of `ckptmap.load`.
    """
    handle = Handle()
    made = _Installed(accelerator, handle, {
        "strict": strict, "precision": precision, "max_memory": max_memory, "random": "leave",
    })  # fmt: skip
    handle.add(accelerator.register_save_state_pre_hook(made.before_save).remove)
    handle.add(accelerator.register_load_state_pre_hook(made.before_load).remove)
    for name in ("save_state", "load_state"):
        setattr(accelerator, name, getattr(made, name))
        handle.add(partial(accelerator.__dict__.pop, name, None))
    return handle


class _Installed:
    def __init__(self, accelerator: Accelerator, handle: Handle, options: LoadKeywords) -> None:
        self._accelerator, self._handle, self._options = accelerator, handle, options
        self._save, self._load = accelerator.save_state, accelerator.load_state
        self._prepared: list[Prepared] = []

    # ------------------------------------------------------------------ saving

    def save_state(self, *args: object, **kwargs: object) -> object:
        with _plain_names():
            return self._save(*args, **kwargs)

    def before_save(
        self, models: Sequence[object], weights: list[Mapping[str, object]], output_dir: str
    ) -> None:
        """Rename the weights that accelerate has gathered, before it writes them."""
        weights[:] = [_plain(state) for state in weights]

    # ------------------------------------------------------------------ loading

    def load_state(self, input_dir: str | None = None, *args: object, **kwargs: object) -> object:
        """Load models and optimizers by `before_load`, and the rest by accelerate, where the directory
        is one of accelerate's."""
        owner = self._accelerator
        self._prepared = prepared(owner)
        try:
            if input_dir is not None and not any(Path(input_dir).expanduser().glob(OWN)):
                self.before_load([], str(input_dir))
                return None
            with _without(owner, "_models", "_optimizers"):
                return self._load(input_dir, *args, **kwargs)
        finally:
            self._prepared = []

    def before_load(self, models: list[object], input_dir: str) -> None:
        """Load from the directory that accelerate has chosen, and empty its list of models."""
        folder = Path(input_dir).expanduser()
        for one in self._prepared:
            self._load_one(one, folder)
        if self._prepared:
            models.clear()

    def _load_one(self, one: Prepared, folder: Path) -> None:
        count = len(self._prepared)
        with (
            open_checkpoint(folder) if count == 1 else open_as(folder, NumberedStates(one, count))
        ) as checkpoint:
            has_state = bool(checkpoint.optimizer_reader.present)
            optimizer = one.optimizer if has_state else None
            if optimizer is not None:
                checkpoint = name_by_live(checkpoint, one.model, optimizer)
            report = load(checkpoint, one.model, optimizer, **self._options)
        self._handle.reports[one.title] = report


@contextmanager
def _without(owner: object, *names: str) -> Iterator[None]:
    """Empty these lists of accelerate's while the context lasts, so that it does not load them."""
    kept = {name: getattr(owner, name) for name in names}
    try:
        for name in names:
            setattr(owner, name, [])
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def _plain(state: Mapping[str, object]) -> OrderedDict[str, object]:
    """Return weights by plain names; in an OrderedDict, by which accelerate knows that ties may be in it."""
    names = strip_wrappers(list(state), WHERE)
    return OrderedDict((plain, state[key]) for key, plain in names.items())


@contextmanager
def _plain_names() -> Iterator[None]:
    """Make accelerate save an FSDP model by plain names while the context lasts.

    Where accelerate has moved its function, the names are those that it writes, and `load_state`
    above reads them too."""
    from accelerate.utils import fsdp_utils

    original = getattr(fsdp_utils, "_get_model_state_dict", None)
    if original is None:
        yield
        return
    fsdp_utils._get_model_state_dict = lambda *args, **kwargs: _plain(original(*args, **kwargs))
    try:
        yield
    finally:
        fsdp_utils._get_model_state_dict = original
