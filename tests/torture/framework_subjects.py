"""What training frameworks save, as subjects of mutants.

Lightning and FSDP1 wrote theirs themselves. Megatron-LM's are written by `tests.support.parallel_writers`,
which cuts a model as Megatron core does, and is proven against tables of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.corpus import Corpus
from tests.torture import framework_readers as f
from tests.torture import mutators as m
from tests.torture import torch_mutators as t
from tests.torture.subjects import DCP, DIRECTORY, ZIP, Subject, converted
from tests.torture.tree_mutators import tree

FILE = (*ZIP, tree, tree, tree)
RANKS = (*FILE, *DIRECTORY)
BESIDE = (*DCP, t.archive, tree, tree, *DIRECTORY)
HYPER = ("hyper_parameters",)


def frameworks(corpus: Corpus, folder: Path, worlds: Sequence[int]) -> list[Subject]:
    """Return the subjects; those of FSDP1's ranks only where `worlds` has 2."""
    return [*lightning(), *megatron(folder), *(flat(corpus, folder) if 2 in worlds else ())]


def lightning() -> list[Subject]:
    from tests.support.paths import GOLDEN

    at = GOLDEN / "lightning"
    whole, average = at / "trainer/trainer.ckpt", at / "ema/ema.ckpt"
    directory, fabric = at / "model_parallel/model_parallel", at / "fabric_fsdp/fabric_fsdp"
    read = f.read_lightning_directory
    return [
        converted("lightning-file", whole, FILE, f.read_lightning, drop=HYPER),
        converted(
            "lightning-kept",
            whole,
            FILE,
            f.read_lightning,
            written=f.read_lightning,
            keep_layout=True,
            drop=HYPER,
        ),
        converted("lightning-ema", average, FILE, f.read_lightning, drop=HYPER),
        converted("lightning-directory", directory, BESIDE, read),
        converted("lightning-fabric", fabric, BESIDE, read),
    ]


def megatron(folder: Path) -> list[Subject]:
    """A model on 2 tensor-parallel ranks and 2 stages, and in the format `torch_dist`."""
    from tests.support.mapping_state import state_of
    from tests.support.parallel_writers import Grid, write_megatron, write_torch_dist

    state = state_of("llama", "megatron")
    ranks = write_megatron(folder / "iter_0000100", state, Grid(2, (1, 1)))
    saved = write_torch_dist(folder / "torch_dist", state)
    described = (*BESIDE, m.json_of("metadata.json"))
    return [
        converted("megatron-ranks", ranks, RANKS, f.read_megatron),
        converted("megatron-torch_dist", saved, described, f.read_torch_dist),
    ]


def flat(corpus: Corpus, folder: Path) -> list[Subject]:
    """FSDP1's flat parameters on 2 ranks, which open with the shapes of another checkpoint."""
    from tests.corpus.models import tiny

    model = tiny()
    like = folder / "like.pt"
    torch.save({key: torch.zeros_like(value) for key, value in model.state_dict().items()}, like)
    parameters: dict[str, Tensor] = {key: p.detach() for key, p in model.named_parameters()}

    def read(path: Path) -> dict[str, Tensor]:
        return dict(f.read_flat_ranks(path, parameters))

    return [
        converted(
            f"fsdp1-{name}", corpus.local(table, name), (*ZIP, *DIRECTORY), read, like=str(like)
        )
        for table, name in (("local", "local_flat_w2"), ("raw", "raw_flat_w2"))
    ]
