"""Read an adapter that peft saved: assign each tensor to its module, as half A or half B.

    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> A of model.layers.0.mlp.up_proj

On disk the adapter's name is dropped from keys, in a model's own state dict (as FSDP2 and DCP save
it) it is there; both are read. The key forms are those of peft's
`get_peft_model_state_dict`, 0.21.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_config import LoraConfig, read_config
from ckptmap.checkpoint.open import open_another
from ckptmap.core.formatting import some
from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.formats.detect import adapters_in, look
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.hub.resolve import locate
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.peft_adapter import ADAPTER_CONFIG

CONFIG = ADAPTER_CONFIG
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
HEAD = "base_model.model."
"""The prefix that peft puts before every name of the model that it wraps."""
_LOW = re.compile(
    r"(?P<module>.+)\.(?P<half>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)(?P<name>[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save\.(?P<name>[^.]+)(?=\.)")
_WHOLE = ".modules_to_save."
_ORIGINAL = ".original_module."
_WRAPPERS = re.compile(r"(?:\.base_layer)+(?=\.|$)")
"""Segments between a wrapper of peft and the module inside; wrappers can nest."""
_TRAINING = ".lora_velora_"
"""Buffers of VeLoRA, which compress activations for the backward pass."""
_HALVES = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}


@dataclass(frozen=True)
class LowRankUpdate:
    """The low-rank change of one tensor of a module.

    embedding  its halves are an embedding's
    names      what the tensor may be called; several where peft has wrapped parameters of a module
               one around the other, of which shapes tell one from the other
    wrapped    peft has wrapped a parameter, not the module
    """

    module: str
    a: LazyTensor
    b: LazyTensor
    embedding: bool
    names: tuple[str, ...]
    wrapped: bool = False
    magnitude: LazyTensor | None = None
    bias: LazyTensor | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter, opened: headers and config only.

    lows    low-rank changes by module, in the order of the file
    trained tensors that take the place of the base's, by FQN
    left    keys that a merge has no use for, with the reason
    files   everything that it is read from
    others  folders of further adapters in its directory, which are not read
    """

    path: str
    config: LoraConfig
    lows: Mapping[str, LowRankUpdate]
    trained: Mapping[str, LazyTensor]
    left: Mapping[str, str]
    files: tuple[str, ...]
    others: tuple[str, ...] = ()

    def without(self, patterns: Sequence[str]) -> Adapter:
        """Return the adapter without the modules and whole tensors that a pattern matches.

        Raises SourceError CKM321 where a pattern matches nothing.
        """
        left = dict(self.left)
        for pattern in patterns:
            modules = [
                k for k, low in self.lows.items() if fnmatch.filter((k, low.module), pattern)
            ]
            matches = modules + fnmatch.filter(self.trained, pattern)
            if not matches:
                raise SourceError(
                    "CKM321",
                    f"--leave {pattern}: matches no module and no whole tensor of {self.path}",
                    "name a module as the base names it, for example --leave 'model.layers.0.mlp.up_proj'",
                )
            left |= dict.fromkeys(matches, f"--leave {pattern}")
        return replace(
            self,
            lows={name: low for name, low in self.lows.items() if name not in left},
            trained={name: lazy for name, lazy in self.trained.items() if name not in left},
            left=left,
        )


def open_adapter(
    path: str | os.PathLike[str],
    mounts: Mounts,
    config: str | os.PathLike[str] | None,
) -> Adapter:
    """Return the adapter at `path`: a peft directory, or a checkpoint with the config beside it.

    It is read through `mounts`. `config` is its adapter_config.json, where that lies elsewhere. Raises SourceError CKM101 where
    nothing is at the path; CKM320 where there is no config, or it asks for what cannot be merged;
    CKM322 where a half is missing.
    """
    place = locate(path, mounts).path
    seen = look(place, mounts)
    weights = next((place / name for name in WEIGHTS if (place / name).is_file()), place)
    several = adapters_in(seen) if seen.is_dir else []
    if seen.is_dir and weights is place and not registry.knows(seen):
        raise SourceError(
            "CKM320",
            f"{path}: holds none of {', '.join(WEIGHTS)}, nor a checkpoint"
            + (f"; it holds adapters: {', '.join(several[:6])}" if several else ""),
            f"name one of them: {quote(str(place / several[-1]))}"
            if several
            else "give the directory that peft's save_pretrained wrote",
        )
    file = _config_file(place, mounts, config)
    ckpt = open_another(weights, mounts)
    settings = read_config(file, mounts)
    lows, trained, left = _assign_tensors(ckpt, settings)
    files = (*ckpt.index.files, str(file.absolute()))
    return Adapter(str(path), settings, lows, trained, left, files, tuple(several))


def _config_file(place: Path, mounts: Mounts, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        path = locate(given, mounts).path
        return path / CONFIG if path.is_dir() else path
    folder = place if place.is_dir() else place.parent
    for candidate in (folder / CONFIG, folder.parent / CONFIG):
        if candidate.is_file():
            return candidate
    raise SourceError(
        "CKM320",
        f"{place}: has no {CONFIG}, which alone tells how much an adapter adds",
        f"give it with --adapter-config PATH, or copy it beside the adapter as {CONFIG}",
    )


# --------------------------------------------------------------------------------- tensors


def held_in(keys: Iterable[str]) -> str:
    """Return what stands before peft's own prefix in every key: a module, Lightning's for example, holds the wrapped
    model under that name. Returns "" where keys differ in it."""
    heads = {key.partition(HEAD)[0] for key in keys}
    head = heads.pop() if len(heads) == 1 else ""
    return head if head.endswith(".") else ""


def _assign_tensors(
    ckpt: Checkpoint, config: LoraConfig
) -> tuple[dict[str, LowRankUpdate], dict[str, LazyTensor], dict[str, str]]:
    halves: dict[str, dict[str, LazyTensor]] = {}
    trained: dict[str, LazyTensor] = {}
    left: dict[str, str] = {}
    embeddings: set[str] = set()
    names: set[str | None] = set()
    holder = len(held_in(ckpt))
    for key in ckpt:
        plain = key[holder:]
        while plain.startswith(HEAD):
            plain = plain.removeprefix(HEAD)
        low, saved = _LOW.fullmatch(plain), _SAVED.search(plain)
        if low is not None:
            half = _HALVES.get(low["half"], low["half"])
            embeddings |= {low["module"]} if low["half"] in _HALVES else set()
            half += ".bias" if low["leaf"] == "bias" else ""
            halves.setdefault(low["module"], {})[half] = ckpt[key]
            names.add(low["name"])
        elif _TRAINING in plain:
            left[key] = "of training alone"
        elif _ORIGINAL in plain:
            left[key] = "of a module that was trained as a whole: as it was before"
        elif plain.endswith(".modules_to_save.bias") and key.replace(_WHOLE, ".") in ckpt:
            left[key] = "of a module that was trained as a whole: its bias once more"
        else:
            name = _SAVED.sub("", plain) if saved else _WRAPPERS.sub("", plain)
            trained[name] = ckpt[key]
            names |= {saved["name"]} if saved else set()
    named = sorted(name for name in names if name is not None)
    if len(named) > 1:
        raise SourceError(
            "CKM320",
            f"{ckpt.path}: holds the adapters {some(named)}, expected one",
            f"save one of them alone: model.save_pretrained(DIR, selected_adapters=[{named[0]!r}])",
        )
    lows = {
        module: _low_rank_update(ckpt, config, module, half, embeddings)
        for module, half in halves.items()
    }
    return lows, trained, left


def _low_rank_update(
    ckpt: Checkpoint,
    config: LoraConfig,
    module: str,
    halves: Mapping[str, LazyTensor],
    embeddings: set[str],
) -> LowRankUpdate:
    known = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_B.bias")
    stranger = next((half for half in halves if half not in known), None)
    if stranger is not None:
        raise SourceError(
            "CKM322",
            f"{ckpt.path}: {module}.{stranger} is not a tensor of LoRA, expected"
            f" {', '.join(known)}",
            "save the adapter again with peft: model.save_pretrained(DIR)",
        )
    for half in ("lora_A", "lora_B"):
        if half not in halves:
            raise SourceError(
                "CKM322",
                f"{ckpt.path}: {module} has no {half}, only {', '.join(halves)}",
                "the adapter was saved in part: gather it from all ranks, then save it again",
            )
    holder = _WRAPPERS.sub("", module)
    names = config.wraps(holder)
    if not names and module.endswith(".base_layer"):
        raise SourceError(
            "CKM322",
            f"{ckpt.path}: {module} is inside a wrapper of peft, and target_parameters in the config"
            f" name no parameter of {holder}",
            "give the adapter_config.json that was saved with the adapter",
        )
    return LowRankUpdate(
        holder, halves["lora_A"], halves["lora_B"], module in embeddings,
        names or (f"{holder}.weight",), bool(names), halves.get("lora_magnitude_vector"),
        halves.get("lora_B.bias"),
    )  # fmt: skip
