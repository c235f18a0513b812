"""One rank under FSDP2, by NCCL on a GPU: loaded from meta, with CPU offload, by `translate`, and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.importable import is_importable
from benchmarks.gpu_session.models import adamw, copied, different, stack, state_of, train
from benchmarks.gpu_session.session import StepRun

LAYERS = 3


def run(step: StepRun) -> None:
    """Train a plain model, save it, and bring it into sharded models in each way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ckptmap

    width = 64 if step.is_tiny else 1024
    truth = stack(LAYERS, width, step.device)
    optimizer = adamw(truth)
    train(truth, optimizer, 0, 2, step.device)
    path = step.work / "plain"
    ckptmap.save(path, truth, optimizer, step=2, background=False)
    wanted, moments = copied(state_of(truth)), copied(state_of(truth, optimizer))
    kind = torch.device(step.device).type
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # the host's name may not resolve
        os.environ.setdefault(name, "lo")
    dist.init_process_group(
        "nccl" if step.on_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh(kind, (1,))
        bench = _Bench(step, mesh, width, path, truth, wanted, moments)
        for name, job in JOBS.items():
            with step.result.attempt(name):
                job(bench)
    finally:
        dist.destroy_process_group()


class _Bench:
    """What each way needs: the mesh, the plain model, its checkpoint and its tensors."""

    def __init__(
        self, step: StepRun, mesh: Any, width: int, path: Path, truth: Any,
        wanted: Mapping[str, Any], with_moments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.step, self.mesh, self.width, self.path, self.truth = step, mesh, width, path, truth
        self.wanted, self.with_moments = wanted, with_moments

    def sharded(self, device: str, **options: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        model = stack(LAYERS, self.width, device, seed=5)
        for layer in model:
            fully_shard(layer, mesh=self.mesh, **options)
        fully_shard(model, mesh=self.mesh, **options)
        return model

    def check(self, what: str, model: Any, optimizer: Any = None) -> None:
        wanted = self.wanted if optimizer is None else self.with_moments
        wrong = different(wanted, state_of(model, optimizer))
        self.step.result.check(f"{what}: {len(wanted)} tensors", not wrong, str(sorted(wrong)[:6]) if wrong else "")  # fmt: skip

    def check_forward(self, what: str, model: Any) -> None:
        """Check that the model computes what the plain one does."""
        import torch

        given = torch.randn(4, self.width, generator=torch.Generator().manual_seed(9)).to(self.step.device)  # fmt: skip
        with torch.no_grad():
            same = torch.equal(model(given), self.truth(given))
        self.step.result.check(f"{what}: the forward's values", same)


def from_meta(bench: _Bench) -> None:
    import ckptmap

    model = bench.sharded("meta")
    ckptmap.load(bench.path, model)
    bench.check("from meta", model)
    places = {param.to_local().device.type for param in model.parameters()}
    bench.step.result.check(
        "from meta: on the device", places == {bench.mesh.device_type}, f"got {places}"
    )
    bench.check_forward("from meta", model)


def with_moments(bench: _Bench) -> None:
    import ckptmap

    model = bench.sharded(bench.step.device)
    optimizer = adamw(model)
    ckptmap.load(bench.path, model, optimizer)
    bench.check("with AdamW", model, optimizer)
    train(model, optimizer, 2, 3, bench.step.device)


def offloaded(bench: _Bench) -> None:
    """Shards on the CPU, arithmetic on the device: a step of training must run after the load."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    import ckptmap

    if not bench.step.on_cuda:
        bench.step.result.note("CPU offload: not run: needs CUDA")
        return
    for start in ("meta", "cpu"):
        model = bench.sharded(start, offload_policy=CPUOffloadPolicy())
        optimizer = adamw(model)
        ckptmap.load(bench.path, model, optimizer)
        what = f"CPU offload from {start}"
        bench.check(what, model, optimizer)
        places = {param.to_local().device.type for param in model.parameters()}
        bench.step.result.check(f"{what}: shards on the CPU", places == {"cpu"}, f"got {places}")
        bench.check_forward(what, model)
        train(model, optimizer, 2, 3, bench.step.device)


def offloaded_nf4(bench: _Bench) -> None:
    """A frozen NF4 weight of one rank: FSDP2 skips the all-gather, the kernel still needs it on the device."""
    if not bench.step.on_cuda or not is_importable("torchao"):
        bench.step.result.note("CPU offload of NF4: not run: needs CUDA, torchao")
        return
    from torch.distributed.fsdp import CPUOffloadPolicy

    import ckptmap

    quantized = bench.step.work / "nf4"
    ckptmap.convert(bench.path, quantized, to="full-nf4", optimizer="drop")
    model = bench.sharded("meta", offload_policy=CPUOffloadPolicy())
    for param in model.parameters():
        param.requires_grad_(False)
    report = ckptmap.load(quantized, model)
    bench.step.result.note(f"CPU offload of NF4: {report}")
    given = next(iter(bench.truth.parameters())).new_zeros(4, bench.width)
    found = model(given)
    bench.step.result.check("CPU offload of NF4: a forward runs", found.device.type == "cuda")


def translated(bench: _Bench) -> None:
    """A plain state dict becomes the sharded model's, and the sharded one another model's."""
    import ckptmap

    model = bench.sharded(bench.step.device)
    state = ckptmap.translate(bench.truth.state_dict(), like=model)
    model.load_state_dict(state)
    bench.check("translate a plain state dict", model)
    other = bench.sharded(bench.step.device)
    other.load_state_dict(ckptmap.translate(model.state_dict(), like=other))
    bench.check("translate DTensors", other)
    bench.check_forward("translate", other)


def saved(bench: _Bench) -> None:
    import ckptmap

    model = bench.sharded(bench.step.device)
    optimizer = adamw(model)
    ckptmap.load(bench.path, model, optimizer)
    path = bench.step.work / "sharded"
    ckptmap.save(path, model, optimizer, step=2).wait()
    plain = stack(LAYERS, bench.width, bench.step.device, seed=6)
    fresh = adamw(plain)
    ckptmap.load(path, plain, fresh)
    bench.check("saved under FSDP2, loaded plain", plain, fresh)


JOBS: dict[str, Callable[[_Bench], None]] = {
    "from meta": from_meta,
    "with AdamW": with_moments,
    "CPU offload": offloaded,
    "CPU offload of NF4": offloaded_nf4,
    "translate": translated,
    "save": saved,
}
