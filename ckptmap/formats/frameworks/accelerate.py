"""Find the parts of a directory that accelerate's `accelerator.save_state()` wrote.

    pytorch_model_fsdp_0/ optimizer_0/                FSDP, SHARDED_STATE_DICT (DCP)
    pytorch_model_fsdp_0_rankR.bin optimizer_0_rankR.bin    the same with use_dcp=False
    pytorch_model_fsdp_rankR.bin optimizer_0/         FSDP1, LOCAL_STATE_DICT
    pytorch_model_fsdp.bin optimizer.bin              FSDP, FULL_STATE_DICT
    model.safetensors | pytorch_model.bin, optimizer.bin    DDP, one process
    scheduler.bin sampler.bin scaler.pt custom_checkpoint_I.pkl random_states_R.pkl    beside each

R is a rank, I the number of an object. Each part is read by the reader of its own format. Source: accelerate 1.15, accelerator.py `save_state`,
checkpointing.py, utils/fsdp_utils.py.
"""

from __future__ import annotations

import re

from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.formats.frameworks import accelerate_names as parts
from ckptmap.protocols import Members, Place

_MARK = re.compile(r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|pytorch_model_fsdp.*")
_EXTRA = re.compile(
    r"optimizer_[1-9]\d*\.bin|scheduler(_\d+)?\.bin|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|scaler\.pt|custom_checkpoint_\d+\.pkl"
)
_RNG = re.compile(r"random_states_(\d+)\.pkl")


class Accelerate:
    """Names the parts of the directory: one model, its optimizer, and extra values (a second optimizer,
    schedulers, samplers, the scaler, custom objects)."""

    name = "accelerate"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with weights, and with a file name that only accelerate uses.

        A directory with trainer_state.json is the Trainer's."""
        if not place.is_dir or "trainer_state.json" in place.names:
            return False
        return bool(parts.matching(_MARK, place)) and bool(parts.weights(place))

    def members(self, place: Place) -> Members:
        """Return the members. Raise SourceError CKM205 if several models were saved together."""
        several = parts.matching(parts.SECOND_MODEL, place)
        if several:
            raise SourceError(
                "CKM205",
                f"{place.path}: expected one model, found several, {several[0]} among them",
                f"open each of them by its own path: {quote(f'{place.path}/{several[0]}')}",
            )
        models, optimizers = parts.weights(place), parts.optimizers(place)
        return Members(
            (*models, *optimizers, *parts.extras(place, _EXTRA)),
            unread_files=parts.matching(_RNG, place),
            world=parts.world_of(place, _RNG),
        )
