"""Writes what is beside this file: runs of Lightning's own Trainer and Fabric, and their truth.

    pip install --no-deps lightning lightning-utilities torchmetrics
    python tests/golden/lightning/make_lightning.py [NAME ...]

lightning 2.6.6 was run with torch 2.13 on the CPU. FSDP is refused there; FSDP's own `save` is
Lightning's all the same. ModelCheckpoint keeps the absolute path of its directory: here another of the
same length was put in its place. `truth.safetensors` has the weights and the moments as they were in memory.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.corpus.writers_fsdp1 import gathered  # noqa: E402
from tests.golden.truth import flattened, put_truth, truth_of  # noqa: E402


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8, bias=False)
    )


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.randn(8, 16, generator=torch.Generator()), 4)


def lightning() -> Any:
    return importlib.import_module("lightning")


def module(make: Callable[..., nn.Module] = net, ignore: tuple[str, ...] = ()) -> Any:
    """A LightningModule as templates write it: everything it is given is a hyper-parameter."""

    class Regression(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module, optimizer: Any, width: int, loss: Any) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False, ignore=ignore)
            self.net, self.loss = net, loss

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.loss(self.net(batch), batch[:, :8])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.hparams.optimizer(self.parameters())
            steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
            return {"optimizer": optimizer, "lr_scheduler": steps}

    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    return Regression(make(), adamw, 32, nn.MSELoss())


def trainer(folder: Path, **more: Any) -> Any:
    callbacks = lightning().pytorch.callbacks
    kept = callbacks.ModelCheckpoint(folder / "kept", monitor="loss", save_top_k=2)
    early = callbacks.EarlyStopping("loss")
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder}
    options["callbacks"] = [kept, early, *more.pop("callbacks", [])]
    return lightning().Trainer(**options, **more)


def single(out: Path) -> None:
    made = module()
    run = trainer(out / "run")
    run.fit(made, batches())
    run.save_checkpoint(out / "trainer.ckpt")
    shutil.rmtree(out / "run")
    put_truth(out, truth_of(made, run.optimizers[0]))


def averaged(out: Path) -> None:
    """The average takes the place of the weights; those that were trained stand beside it."""
    made = module(plain, ignore=("net", "loss"))
    ema = lightning().pytorch.callbacks.EMAWeightAveraging(decay=0.9)
    run = trainer(out / "run", callbacks=[ema])
    run.fit(made, batches())
    (last,) = (out / "run/kept").glob("epoch=1-*.ckpt")  # before the average replaced the model
    last.rename(out / "ema.ckpt")
    shutil.rmtree(out / "run")
    put_truth(out, truth_of(made, run.optimizers[0]))


def gan(out: Path) -> None:
    """Two optimizers, each of its own half."""

    class Gan(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.made, self.seen = nn.Linear(8, 4), nn.Linear(4, 8)

        def training_step(self, batch: Tensor, _: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(self.seen(self.made(batch[:, :8])).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam
            return adam(self.made.parameters(), lr=1e-2), adam(self.seen.parameters(), lr=1e-2)

    made = Gan()
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": out / "r"}
    run = lightning().Trainer(**options, enable_checkpointing=False)
    run.fit(made, batches())
    run.save_checkpoint(out / "gan.ckpt")
    put_truth(out, truth_of(made))


def steps(run: Any, model: Any, optimizer: Any) -> None:
    for batch in batches():
        run.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------- two ranks


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in (model[0], model[2]):  # type: ignore[index]
        fully_shard(child, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def model_parallel(out: Path, rank: int) -> None:
    """Trainer, ModelParallelStrategy: a DCP directory."""
    made = module(plain, ignore=("net", "loss"))

    class Sharded(type(made)):  # type: ignore[misc]
        def configure_model(self) -> None:
            sharded(self.net, self.device_mesh)

    made.__class__ = Sharded
    strategy = lightning().pytorch.strategies.ModelParallelStrategy(2, 1)
    folder = out / "run"
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "default_root_dir": folder}
    run = lightning().Trainer(**options, strategy=strategy, enable_checkpointing=False)
    run.fit(made, batches())
    run.save_checkpoint(out / "model_parallel")
    put_truth(out, truth_of(made, run.optimizers[0]), rank)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))


def fabric_fsdp(out: Path, rank: int) -> None:
    """Fabric, FSDPStrategy of FSDP1: a DCP directory under the user's names."""
    kind = lightning().fabric.strategies.FSDPStrategy

    class OnTheCpu(kind):  # type: ignore[misc]
        """Fabric refuses its own class where there is no GPU."""

    strategy = OnTheCpu(state_dict_type="sharded")
    run = lightning().Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    wrap = functools.partial(torch.distributed.fsdp.FullyShardedDataParallel, use_orig_params=True)
    model = plain()
    for number in (0, 2):
        model[number] = wrap(model[number], device_id=torch.device("cpu"))  # type: ignore[index,operator]
    model = run.setup_module(wrap(model, device_id=torch.device("cpu")))
    optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    steps(run, model, optimizer)
    run.save(out / "fabric_fsdp", {"net": model, "optim": optimizer, "iteration": 2, "seed": 7})
    put_truth(out, flattened(gathered(model.module, optimizer.optimizer)), rank)


WRITERS: dict[str, tuple[Callable[..., None], int]] = {
    "trainer": (single, 1), "ema": (averaged, 1), "gan": (gan, 1),
    "model_parallel": (model_parallel, 2), "fabric_fsdp": (fabric_fsdp, 2),
}  # fmt: skip


def on_rank(rank: int, name: str, port: int) -> None:
    write, world = WRITERS[name]
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "NODE_RANK": "0", "GROUP_RANK": "0"}
        os.environ["TORCHELASTIC_RUN_ID"] = "golden"
    torch.set_num_threads(1)
    out = HERE / name
    write(out, *([rank] if world > 1 else []))


def main() -> None:
    for number, name in enumerate(sys.argv[1:] or WRITERS):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        multiprocessing.spawn(on_rank, (name, 29611 + number), nprocs=WRITERS[name][1])


if __name__ == "__main__":
    main()
