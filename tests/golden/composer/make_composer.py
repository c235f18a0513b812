"""Writes what is beside this file: runs of Composer's own Trainer, and their truth.

    pip install --no-deps mosaicml torchmetrics torchvision torch-optimizer pytorch-ranger coolname \\
        tabulate py-cpuinfo importlib-metadata zipp requests urllib3 charset-normalizer certifi
    python tests/golden/composer/make_composer.py [NAME ...]

mosaicml 0.32.1 was run with torch 2.13 on the CPU. It asks for an older torch and for its
company's client, which takes no part in saving.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
sys.modules["mcli"] = ModuleType("mcli")

from tests.golden.truth import put_truth, truth_of  # noqa: E402


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))


def model() -> Any:
    kind = importlib.import_module("composer.models").ComposerModel

    class Regression(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, batch: Any) -> Tensor:
            made: Tensor = self.net(batch[0])
            return made

        def loss(self, outputs: Tensor, batch: Any, *_: Any) -> Tensor:
            return (outputs - batch[1]).square().mean()

    return Regression()


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(8, 16, generator=generator)
    data = torch.utils.data.TensorDataset(values, values[:, :8])
    spread = importlib.import_module("composer.utils.dist").get_sampler(data)
    return torch.utils.data.DataLoader(data, 4, sampler=spread)


def trainer(made: Any, folder: Path, *ignored: str) -> Any:
    composer = importlib.import_module("composer")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    return composer.Trainer(
        model=made, train_dataloader=loader(), optimizers=optimizer, max_duration="1ba",
        schedulers=composer.optim.LinearScheduler(), device="cpu", run_name="golden",
        save_folder=str(folder), save_filename="run.pt", save_latest_filename=None,
        save_interval="1ba", progress_bar=False, save_ignore_keys=list(ignored),
    )  # fmt: skip


def single(out: Path, rank: int) -> None:
    made = model()
    run = trainer(made, out)
    run.fit()
    put_truth(out, truth_of(made, run.state.optimizers[0]), rank)


SHORTENED = tuple(f"state/{k}" for k in ("metadata", "schedulers", "callbacks", "timestamp"))
"""Each value of them is a file of its own in a DCP."""


def sharded(out: Path, rank: int) -> None:
    """FSDP2, state_dict_type "sharded": a DCP directory."""
    from torch.distributed.fsdp import fully_shard

    importlib.import_module("composer.utils.dist").initialize_dist("cpu")
    made = model()
    for child in (made.net[0], made.net[2], made.net):
        fully_shard(child, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    run = trainer(made, out / "run", *SHORTENED)
    # On the CPU the Trainer takes none, and wraps nothing itself.
    config = importlib.import_module("composer.utils.parallelism").FSDPConfig
    run.state.fsdp_config = config(state_dict_type="sharded", sharded_ckpt_prefix_dir="ba1")
    run.fit()
    put_truth(out, truth_of(made, run.state.optimizers[0]), rank)


WRITERS: dict[str, tuple[Callable[[Path, int], None], int]] = {
    "single": (single, 1), "sharded": (sharded, 2)
}  # fmt: skip


def on_rank(rank: int, name: str, port: int) -> None:
    write, world = WRITERS[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    write(HERE / name, rank)


def main() -> None:
    for number, name in enumerate(sys.argv[1:] or WRITERS):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        multiprocessing.spawn(on_rank, (name, 29711 + number), nprocs=WRITERS[name][1])


if __name__ == "__main__":
    main()
