"""Low-bit moments on another number of ranks: nothing is lost but what is said.

python -m tests.ranks.resume_reshard write|read FOLDER OPTIMIZERS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit
from ckptmap.optim.lowbit import LowBit
from tests.support.resume_model import built, train
from tests.support.resume_optimizers import ALL


def run(name: str, seed: int) -> tuple[Any, Any]:
    fix_lowbit.apply()
    model = built("fsdp2", "eager", seed, torch.bfloat16)
    return model, ALL[name](model.parameters())


def write(folder: Path, name: str) -> None:
    model, optimizer = run(name, 0)
    train(model, optimizer, 0, 3, dist.get_rank())
    ckptmap.save(folder / f"{name}-{dist.get_world_size()}", model, optimizer).wait()


def values(tensor: Any) -> Any:
    """Decoded values of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.dequantize() if hasattr(local, "codes") else local.float()


def is_coded(tensor: Any) -> bool:
    return hasattr(tensor.to_local(), "codes")


def read(folder: Path, name: str) -> None:
    world = dist.get_world_size()
    fresh, theirs = run(name, 2)
    train(fresh, theirs, 0, 1, dist.get_rank())
    for source in sorted(folder.glob(f"{name}-*")):
        with ckptmap.open(source) as ckpt:
            made = None
            for precision in ("target", "keep", "fp32"):
                model, optimizer = run(name, 1)
                report = ckptmap.load(source, model, optimizer, precision=precision)
                assert report.state is not None and not report.state.initialised, report
                compare(ckpt, model, optimizer, precision, report)
                if precision == "target":
                    made = forms(model, optimizer)
                    assert made == forms(fresh, theirs), "not as the optimizer itself would"
                train(model, optimizer, 3, 4, dist.get_rank())
                if precision != "fp32":
                    continue
                assert not any(coded for coded, _ in forms(model, optimizer).values())
            assert made is not None
            if world == ckpt.world_size:
                assert report.state is not None


def forms(model: Any, optimizer: Any) -> dict[str, tuple[bool, Any]]:
    """In codes or not, and in which dtype, moment by moment on this rank."""
    return {
        f"{fqn}.{name}": (is_coded(optimizer.state[p][name]), optimizer.state[p][name].dtype)
        for fqn, p in model.named_parameters()
        for name in ("exp_avg", "exp_avg_sq")
    }


def compare(ckpt: Any, model: Any, optimizer: Any, precision: str, report: Any) -> None:
    """Bit-equal to the checkpoint's decoded values, or within what the report says."""
    said = {entry.name: entry.error for entry in report.state.recoded}
    said |= {entry.fqn: 2.0**-8 for entry in report.state.cast}
    for fqn, param in model.named_parameters():
        rank, world = dist.get_rank(), dist.get_world_size()
        step = -(-param.shape[0] // world)
        rows = slice(min(rank * step, param.shape[0]), min((rank + 1) * step, param.shape[0]))
        for name in ("exp_avg", "exp_avg_sq"):
            lazy = ckpt.optimizer[fqn][name]
            want = lazy.read().float()[rows]
            found = values(optimizer.state[param][name])
            error = float((found - want).norm() / max(float(want.norm()), 1e-30))
            limit = said.get(f"{fqn}.{name}", 0.0) * 1.01
            assert error <= limit, (precision, fqn, name, error, limit)
            if precision in ("keep", "fp32"):
                assert error == 0.0, (precision, fqn, name, error)
            if precision == "keep" and isinstance(lazy.encoding_, LowBit) and world == 1:
                assert is_coded(optimizer.state[param][name]) or lazy.encoding_.cells


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    for chosen in sys.argv[3].split(","):
        {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), chosen)
    dist.barrier()
    dist.destroy_process_group()
