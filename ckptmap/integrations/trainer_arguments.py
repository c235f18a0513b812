"""Arguments of transformers' Trainer that decide the next steps and that no state dict holds: `trainer_callback` records
them, and `resume` compares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

KEY = "trainer_arguments"
"""Key of the arguments among the extra values."""
COMPARED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "max_grad_norm",
    "label_smoothing_factor", "dataloader_drop_last", "ignore_data_skip", "lr_scheduler_type",
)  # fmt: skip
OF_SCHEDULE = ("max_steps", "num_train_epochs", "warmup_steps")
"""Arguments that a schedule is made of: a constant one goes on, however long the run is."""
CONSTANT = "constant"
ROWS = "rows of a step"


def described(args: object) -> dict[str, object]:
    """Return the arguments as plain values, and how many rows all ranks take in a step."""
    found = {name: getattr(args, name) for name in COMPARED if hasattr(args, name)}
    schedule = str(getattr(found.get("lr_scheduler_type"), "value", found.get("lr_scheduler_type")))
    found["lr_scheduler_type"] = schedule
    if schedule != CONSTANT:
        found |= {name: getattr(args, name) for name in OF_SCHEDULE if hasattr(args, name)}
    sizes = (getattr(args, name, 1) for name in ("train_batch_size", "gradient_accumulation_steps", "world_size"))  # fmt: skip
    rows = 1
    for size in sizes:
        rows *= size
    return {**found, ROWS: rows}


def differences(saved: object, args: object) -> Iterator[str]:
    """Yield a phrase for every argument that differs; nothing where none were recorded."""
    if not isinstance(saved, Mapping):
        return
    live = described(args)
    for name in dict.fromkeys([ROWS, *saved, *live]):
        if saved.get(name) != live.get(name):
            yield f"{name}: was {saved.get(name)}, is {live.get(name)}"
