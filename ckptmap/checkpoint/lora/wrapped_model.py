"""A whole model, saved as peft has wrapped it: as an adapter it brings its own base, as a base its own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import Adapter
from ckptmap.core.formatting import counted, some
from ckptmap.core.printable import join
from ckptmap.errors import SourceError
from ckptmap.mapping.wrappers import ADAPTER, BASE_LAYER


def own_weights(adapter: Adapter, own: Sequence[str], base: Checkpoint) -> Iterator[str]:
    """Yield a note on the weights that the adapter holds whole, in place of the base's."""
    if any(BASE_LAYER in adapter.trained[name].fqn for name in own):
        yield (
            f"{adapter.path} holds the whole model that peft has wrapped, not an adapter alone:"
            f" {counted(len(own), 'weight', 'is', 'are')} taken from there, not from {base.shown}"
        )
    elif own:
        yield (
            f"{counted(len(own), 'weight', 'is', 'are')} taken whole from {adapter.path}, not from"
            f" {base.shown}: {some(own)}"
        )


def refuse_wrapped(ckpt: Checkpoint, adapter: Adapter) -> None:
    """Raise SourceError CKM321 for a base that is the model as peft has wrapped it: its adapter is in it already."""
    below = next((name for name in ckpt if BASE_LAYER in name), None)
    if below is None or not any(ADAPTER in name for name in ckpt):
        return
    line = ["ckptmap", "merge", "BASE", ckpt.shown, "DST", "--adapter-config", adapter.config.file]
    raise SourceError(
        "CKM321",
        f"{ckpt.shown}: {below}: is a weight below peft's adapter, expected a base without one; this checkpoint holds"
        " the wrapped model, its adapter too",
        f"merge what it holds into the model that was trained: {join(line)}",
    )
