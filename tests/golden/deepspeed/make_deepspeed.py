"""Writes what is beside this file: checkpoints of DeepSpeed ZeRO, and what it had in memory.

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed hjson py-cpuinfo msgpack
    python tests/golden/deepspeed/make_deepspeed.py

deepspeed 0.19.8 was run with torch 2.13 on the CPU, over gloo. `samples.tar.xz` has for each run what
`save_checkpoint` wrote (its two scripts are left out) and `truth.safetensors`: the weights as DeepSpeed's
own script `zero_to_fp32.py` gives them, the fp32 weights and the moments as DeepSpeed's own functions
gather them from the ranks. `trainer/checkpoint-2` is of transformers' Trainer: `model.safetensors` has its
16-bit weights. Its training_args.bin is left out, which names the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
SAMPLES = HERE / "samples.tar.xz"
STEPS = 3
TRAINER_WORLD = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Run:
    """One training run: `options` are those of DeepSpeed's `zero_optimization`, `more` of its config."""

    name: str
    stage: int
    world: int
    dtype: str = "bf16"
    optimizer: str = "AdamW"
    groups: int = 1
    frozen: bool = False
    tied: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    exclude_frozen: bool = False
    universal: bool = False


def _grid() -> list[Run]:
    runs = []
    for stage in (1, 2, 3):
        for world in (1, 2, 3):
            dtype = ("fp32", "bf16", "fp16")[(stage + world) % 3]
            more = {"groups": 1 + world % 2, "frozen": world != 1, "tied": world != 2}
            runs.append(Run(f"z{stage}w{world}", stage, world, dtype, **more))
    return runs


RUNS = [
    *_grid(),
    Run("z1-sgd", 1, 2, "fp32", "SGD", groups=2),
    Run("z2-momentum", 2, 3, "bf16", "Momentum"),
    Run("z3-adagrad", 3, 2, "fp32", "Adagrad"),
    Run("z2-round-robin", 2, 3, "bf16", groups=2, options={"round_robin_gradients": True}),
    Run("z2-aligned", 2, 2, "bf16", groups=2, options={"parameter_alignment": True}),
    Run("z1-elastic", 1, 3, "fp32", groups=2, options={"elastic_checkpoint": True}),
    Run("z1-bf16-optimizer", 1, 2, "bf16", groups=2, tied=True,
        more={"data_types": {"grad_accum_dtype": "fp32"}}),
    Run("z3-sub-groups", 3, 3, "bf16", groups=2, frozen=True, options={"sub_group_size": 40}),
    Run("z3-offload", 3, 2, "bf16", groups=2,
        options={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    Run("z2-offload", 2, 2, "bf16", options={"offload_optimizer": {"device": "cpu"}}),
    Run("z3-exclude-frozen", 3, 2, "bf16", frozen=True, exclude_frozen=True),
    Run("z1-universal", 1, 2, "bf16", groups=2, frozen=True, tied=True, universal=True),
    Run("z3-universal", 3, 2, "fp32", groups=2, frozen=True, tied=True, universal=True),
]  # fmt: skip


class Net(nn.Module):
    """Odd sizes, so that partitions are padded and parameters are split inside."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.inner(self.embed(ids)) * self.scale
        return self.head(hidden)


def model_of(run: Run) -> Net:
    torch.manual_seed(7)
    made = Net(run.tied)
    if run.frozen:
        made.inner[2].requires_grad_(False)
    return made.to(DTYPES[run.dtype])


def groups_of(model: nn.Module, number: int) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if number == 1:
        return [{"params": trained}]
    matrices = [p for p in trained if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def optimizer_of(run: Run, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if run.optimizer == "Momentum":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    made: torch.optim.Optimizer = getattr(torch.optim, run.optimizer)(groups, lr=1e-2)
    return made


def config_of(run: Run) -> dict[str, Any]:
    zero = {"stage": run.stage, "stage3_param_persistence_threshold": 8, **run.options}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": run.dtype == "bf16"},
        "fp16": {"enabled": run.dtype == "fp16", "initial_scale_power": 4},
        **run.more,
    }


def _engine(run: Run) -> Any:
    import deepspeed

    model = model_of(run)
    optimizer = optimizer_of(run, groups_of(model, run.groups))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(run))
    return engine


def train(run: Run, out: Path) -> None:
    """Train on all ranks, and save below `out`: the run's directory, and on rank 0 its truth."""
    engine, rank = _engine(run), torch.distributed.get_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 7, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(ids).float(), ids.roll(1))
        engine.backward(loss)
        engine.step()
    state = {"epoch": 1, "note": {"seen": [3, 5]}}
    folder = out / run.name
    engine.save_checkpoint(folder, client_state=state, exclude_frozen_parameters=run.exclude_frozen)
    truth = _gathered(engine, run)
    torch.distributed.barrier()
    if rank == 0:
        _finish(run, folder, truth)
    torch.distributed.barrier()
    engine.destroy()


def _gathered(engine: Any, run: Run) -> dict[str, Tensor]:
    """Return the fp32 weights and the moments by DeepSpeed's own functions. Every rank calls it."""
    from deepspeed import utils

    if run.options.get("round_robin_gradients"):
        return _gathered_in_order(engine, run)
    found = {}
    if run.stage < 3:  # they were linked before the first step, when there was no state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"masters/{name}"] = utils.safe_get_full_fp32_param(parameter)
        for state in STATES[run.optimizer]:
            value = utils.safe_get_full_optimizer_state(parameter, state)
            found[f"optimizer/{name}/{state}"] = value
    shapes = {
        n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in engine.module.named_parameters()
    }
    return {k: v.detach().clone().reshape(shapes[k.split("/")[1]]) for k, v in found.items()}


def _gathered_in_order(engine: Any, run: Run) -> dict[str, Tensor]:
    """The same of parameters whose order DeepSpeed changed: its functions read those as if it had not."""
    found, zero = {}, engine.optimizer
    for group, flat in zip(
        zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups, strict=True
    ):
        values = {"masters": flat}
        values |= {state: zero.optimizer.state[flat][state] for state in STATES[run.optimizer]}
        for state, mine in values.items():
            parts = [torch.empty_like(mine) for _ in range(run.world)]
            torch.distributed.all_gather(parts, mine.detach())
            runs = torch.cat(parts)[: sum(p.numel() for p in group)].split(
                [p.numel() for p in group]
            )
            for parameter, one in zip(group, runs, strict=True):
                name = engine.param_names[parameter]
                key = f"masters/{name}" if state == "masters" else f"optimizer/{name}/{state}"
                found[key] = one.clone().reshape(parameter.shape)
    return found


STATES: dict[str, Sequence[str]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"), "SGD": (), "Momentum": ("momentum_buffer",), "Adagrad": ("sum",),
}  # fmt: skip


def _finish(run: Run, folder: Path, truth: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    if "bf16-optimizer" not in run.name:  # the script does not read that form
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        truth |= {f"weights/{name}": value.clone().contiguous() for name, value in whole.items()}
    save_file(truth, folder / "truth.safetensors")
    for script in folder.glob("*.py"):
        script.unlink()
    if run.universal:
        _make_universal(folder)


def _make_universal(folder: Path) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    step = folder / f"global_step{STEPS}"
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    to = str(folder / f"global_step{STEPS}_universal")
    ds_to_universal.main(Namespace(input_folder=str(step), output_folder=to, **workers, **options))
    shutil.rmtree(step)
    (folder / "latest").unlink()


def train_by_trainer(out: Path) -> None:
    """Train a tiny Llama by transformers' Trainer under stage 2, in the working directory `out`."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    out.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    os.chdir(out)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 17}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    run = Run("trainer", 2, 2)
    config = config_of(run) | {"gradient_accumulation_steps": 1}
    options: dict[str, Any] = {
        "max_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
    }
    options |= {"bf16": True, "use_cpu": True, "ddp_backend": "gloo", "optim": "adamw_torch"}
    args = TrainingArguments("trainer", deepspeed=config, per_device_train_batch_size=4, **options)
    data = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i} for i in range(11)]
    Trainer(model, args, train_dataset=data).train()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        folder = out / "trainer" / "checkpoint-2"
        for name in ("zero_to_torch.py", "training_args.bin"):
            (folder / name).unlink()
        (folder / "zero_to_fp32.py").write_text("")  # its name marks the directory


def _main(rank: int, world: int, port: int, runs: Sequence[Run], out: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import deepspeed
    import deepspeed.accelerator

    torch.set_num_threads(1)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: (
        True
    )  # torch computes it on the CPU
    deepspeed.init_distributed(dist_backend="gloo")
    for run in runs:
        train(run, out)
    if world == TRAINER_WORLD:
        train_by_trainer(out)
    torch.distributed.destroy_process_group()


def write(runs: Sequence[Run], out: Path) -> None:
    """Write runs by DeepSpeed, each below `out`: one start of the processes for each number of ranks."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    for world in sorted({run.world for run in runs}):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mine = [run for run in runs if run.world == world]
        torch.multiprocessing.spawn(_main, (world, port, mine, out), nprocs=world)


def unpack(out: Path) -> None:
    """Unpack the samples below `out`."""
    with tarfile.open(SAMPLES) as archive:
        archive.extractall(out, filter="data")


def pack(folder: Path) -> None:
    """Make the samples of what lies in `folder`."""
    with tarfile.open(SAMPLES, "w:xz", preset=9) as archive:
        for name in (*(run.name for run in RUNS), "trainer"):
            archive.add(folder / name, name, filter=_plain)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))
    with tempfile.TemporaryDirectory() as folder:
        write(RUNS, Path(folder))
        pack(Path(folder))
