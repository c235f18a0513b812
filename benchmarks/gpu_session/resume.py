"""A run that was saved and continued makes the same bits as one that was not stopped.

Dropout draws from the device's own generator, so its state must come back, too.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_session.models import adamw, copied, different, stack, state_of, train
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import same_bits

LAYERS, DROPOUT = 3, 0.3
HALF, END = 5, 10


def run(step: StepRun) -> None:
    """Train through, then with a save and a load halfway, and compare losses and tensors."""
    import torch

    import ckptmap

    width = 64 if step.is_tiny else 1024
    model, optimizer = fresh(width, step.device, 0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = train(model, optimizer, 0, HALF, step.device)
    scheduler.step()
    path = step.work / "half"
    views = awkward_views(step.device)
    ckptmap.save(path, model, optimizer, scheduler, step=HALF, extra=views).wait()
    losses = train(model, optimizer, HALF, END, step.device)
    wanted, drawn = copied(state_of(model, optimizer)), torch.rand(8, device=step.device)

    for turn in range(2):
        model, optimizer = fresh(width, step.device, 100 + turn)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        torch.rand(1000 * turn + 3, device=step.device)
        report = ckptmap.load(path, model, optimizer, scheduler, exact=True)
        found = train(model, optimizer, HALF, END, step.device)
        what = f"continuation {turn + 1}"
        step.result.check(f"{what}: the losses", found == losses, f"expected {losses}, got {found}")
        wrong = [name for name, view in views.items() if not same_bits(view, report.extra[name])]
        step.result.check(f"{what}: views of other tensors", not wrong, str(wrong) if wrong else "")
        wrong = different(wanted, state_of(model, optimizer))
        step.result.check(f"{what}: {len(wanted)} tensors", not wrong, str(sorted(wrong)[:6]) if wrong else "")  # fmt: skip
        again = torch.rand(8, device=step.device)
        step.result.check(f"{what}: the device's random numbers", torch.equal(drawn, again))
        if turn == 0:
            step.result.note(f"report: {report}"[:600])


def awkward_views(device: str) -> dict[str, Any]:
    """Return views whose memory is not their values: a copy that is under way must not change them."""
    import torch

    whole = torch.randn(1 << 20, dtype=torch.complex64, device=device)
    return {
        "conjugate": whole.conj(),
        "negative": whole.conj().imag,
        "transposed": whole.real.view(1024, -1).t(),
        "expanded": whole.real[:5].expand(7, 5),
        "of bytes": torch.arange(250, dtype=torch.uint8, device=device)[1:],
        "empty": whole.real[:0],
        "scalar": whole.real[3],
    }


def fresh(width: int, device: str, seed: int) -> tuple[Any, Any]:
    model = stack(LAYERS, width, device, seed, DROPOUT)
    return model, adamw(model)
