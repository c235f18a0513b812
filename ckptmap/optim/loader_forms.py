"""Optimizer state in the form that a library's own `load_state_dict` takes, or a refusal.

torch.optim       as it is: plain tensors by torch's names
bitsandbytes      keyed by index: its own tensors and names; by name: nothing loads it
torchao's codes   nothing: its load_state_dict takes pickled objects alone, which ckptmap never writes
"""

from __future__ import annotations

from ckptmap.errors import PlanError
from ckptmap.optim.bnb_writer import as_bnb, is_bnb
from ckptmap.optim.lowbit import LowBit
from ckptmap.optim.state import Optimizer

LIVE = (
    "load the checkpoint as it is into the live optimizer: ckptmap.load(path, model, optimizer), for"
    " Trainer ckptmap.integrations.transformers.resume(trainer, path); or leave the state behind with"
    " --optimizer drop"
)
IN_BNBS_FORM = "optimizer: written as bitsandbytes' own load_state_dict takes it"


def for_loader(optimizer: Optimizer, by_index: bool, who: str) -> tuple[Optimizer, list[str]]:
    """Return the state as the loader of the output takes it, and notes.

    by_index  is the state keyed by index?
    who       what is written, for errors

    Raises PlanError CKM203 where the optimizer's next step would fail.
    """
    coded = next(
        (
            lazy
            for state in optimizer.tensors.values()
            for lazy in state.values()
            if isinstance(lazy.encoding_, LowBit) and lazy.encoding != "bnb8bit"
        ),
        None,
    )
    if coded is not None:
        raise PlanError(
            "CKM203",
            f"{coded.fqn}: is {coded.encoding}, which {who} cannot hold: torchao's load_state_dict"
            " takes its own pickled objects alone",
            LIVE,
        )
    if not is_bnb(optimizer):
        return optimizer, []
    if not by_index:
        raise PlanError(
            "CKM203",
            f"optimizer: its state is that of bitsandbytes, and {who} keys it by name, by which"
            " bitsandbytes cannot load it",
            LIVE,
        )
    return as_bnb(optimizer), [IN_BNBS_FORM]
