"""Frameworks resume from directories that ckptmap wrote: run by `tests.formats.test_frameworks`.

python -m tests.ranks.directories accelerate DIR TRUTH KIND   on 2 ranks, FSDP1 and FSDP2
python -m tests.ranks.directories regroup FROM FILE       step 2, its optimizer in other groups
python -m tests.ranks.directories run DIR                 a Trainer run of 4 steps, in DIR
python -m tests.ranks.directories resume DIR FROM         the same, from a checkpoint of step 2

Both take the name of an optimizer of Trainer's after FROM, which is empty for `run`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def accelerate(folder: str, truth_file: str, kind: str) -> None:
    """load_state into fresh models whose values are all zero; every value must be the truth's."""
    from tests.corpus.writers_accelerate import fsdp_plugin
    from tests.corpus.writers_directories import prepared
    from tests.corpus.writers_fsdp1 import gathered as gathered_fsdp1
    from tests.corpus.writers_fsdp2 import gathered as gathered_fsdp2

    truth = torch.load(truth_file, weights_only=True)
    for version, gather in ((1, gathered_fsdp1), (2, gathered_fsdp2)):
        made, model, optimizer = prepared(fsdp_plugin(version, kind), with_rest=True, fresh=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        made.load_state(folder)
        got = gather(model, optimizer)
        same(got.model, truth["model"])
        assert set(got.optimizer) == set(truth["optimizer"])
        for name, state in truth["optimizer"].items():
            same(got.optimizer[name], state)
        check_rest(made)
        if dist.get_rank() == 0:
            print(f"fsdp{version}: {len(got.model)} weights, {len(got.optimizer)} states")


def check_rest(made: Any) -> None:
    """What else `load_state` sets is what the writer of the corpus left."""
    from tests.corpus.writers_directories import Counter

    assert [wrapped.scheduler.last_epoch for wrapped in made._schedulers] == [7, 9]
    assert made.step == 3  # of every rank: those that the source had not would gather otherwise
    (custom,) = made._custom_objects
    window = custom.state.pop("window")
    same({"window": window}, {"window": Counter(41).state["window"]})
    assert custom.state == {"seen": 41, "at": (3, None)}


def regroup(source: str, file: str) -> None:
    """A checkpoint of Trainer's as one torch.save file of another loop's: norms first, and in each
    group parameters from the last to the first; torch's own API moves the state by name."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    made = trainer_of(source, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {**group, "params": [(names[id(p)], p) for p in group["params"][::-1]]}
        for group in made.param_groups[::-1]
    ]
    mine = torch.optim.AdamW(groups)
    set_optimizer_state_dict(model, mine, get_optimizer_state_dict(model, made))
    state = {
        "model": dict(model.state_dict()),
        "optimizer": mine.state_dict(),
        "scheduler": torch.load(Path(source) / "scheduler.pt", weights_only=True),
        "trainer_state": json.loads((Path(source) / "trainer_state.json").read_text()),
    }
    torch.save(state, file)


def trainer_of(source: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer as Trainer makes it, with the state that Trainer saved."""
    from tests.corpus.writers_directories import trainer

    with tempfile.TemporaryDirectory() as folder:
        made = trainer(Path(folder))
        made.model = model
        optimizer: torch.optim.Optimizer = made.create_optimizer()
    optimizer.load_state_dict(torch.load(Path(source) / "optimizer.pt", weights_only=True))
    return optimizer


def same(got: Any, truth: dict[str, Tensor]) -> None:
    assert set(got) == set(truth)
    for name, value in truth.items():
        assert torch.equal(got[name].cpu(), value), name


def trainer(folder: str, source: str = "", optim: str = "") -> None:
    """Losses and learning rates of each step, as JSON."""
    from transformers.training_args import OptimizerNames

    from tests.corpus.writers_directories import fresh_accelerate, trainer

    fresh_accelerate()
    made = trainer(Path(folder), steps=4)
    if optim:
        torch.compiler.set_stance("force_eager")  # torchao compiles its step by inductor: 10 s
        made.args.optim = OptimizerNames(optim)
    if source:
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.zero_()
    made.train(resume_from_checkpoint=source or None)
    kept = ("step", "loss", "grad_norm", "learning_rate")
    log = [{key: e[key] for key in kept} for e in made.state.log_history if "loss" in e]
    if int(os.environ.get("RANK", 0)) == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(log))


def main(what: str, *args: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if what == "accelerate":
        dist.init_process_group("gloo")
        accelerate(*args)
        dist.barrier()
        dist.destroy_process_group()
    elif what == "regroup":
        regroup(*args)
    else:
        trainer(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
