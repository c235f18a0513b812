"""Code that was written since a GPU was last at hand: what it must give, and that nothing in it waits for the device.

Each part stands alone: one that fails leaves the others. What needs a GPU is left out on a CPU.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_session.importable import is_importable
from benchmarks.gpu_session.models import adamw, copied, different, stack, state_of, train
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import clocked, same_bits, synchronize

SLEEP_S = 1.0
"""Seconds of work that the device has ahead where a call must not wait for it."""
NBYTES = 64 << 20
NUMERICS: dict[str, Callable[..., Any]] = {
    "a / b": lambda a, b: a / b,
    "a * b + a": lambda a, b: a * b + a,
    "a * 1e-30 * 1e-10": lambda a, b: a * 1e-30 * 1e-10,
}


def run(step: StepRun) -> None:
    parts: dict[str, Callable[[StepRun], None]] = {
        "threads that help": helped,
        "casts to float16": casts,
        "buffers that are not saved": unsaved_buffers,
        "a frozen base that is left out": frozen_base,
        "moments of blocks that ranks share": shared_moments,
        "double quantization of bitsandbytes": double_quantized,
    }
    if step.on_cuda:
        parts |= {
            "CUDA's library": library,
            "registered memory": registered,
            "a fork": forked,
            "a save with work ahead": saved_with_work_ahead,
            "a graph is captured while a save waits": captured_while_saved,
            "compiled kernels": compiled_numerics,
        }
    for name, part in parts.items():
        with step.result.attempt(name):
            part(step)


# ------------------------------------------------------------------------------- memory


def library(step: StepRun) -> None:
    """CUDA's own functions are found by the name that its library has in this build of torch."""
    from ckptmap.storage import registered_memory

    for name in ("cudaThreadExchangeStreamCaptureMode", "cudaGetLastError"):
        found = registered_memory._function(name)
        step.result.check(f"{name} is found", found is not None)


def registered(step: StepRun) -> None:
    """Memory counts as pinned for every device, copies to it let the host go on, and a refusal leaves no error."""
    import torch

    from ckptmap.storage import registered_memory

    before = registered_memory.COUNT.now
    memory = registered_memory.registered_memory(NBYTES)
    assert memory is not None, "CUDA does not take it"
    pinned = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            pinned.append(memory.is_pinned() and memory[4096:8192].is_pinned())
    step.result.check(f"pinned for {len(pinned)} devices", all(pinned), str(pinned))
    there = torch.arange(NBYTES, device=step.device).to(torch.uint8)
    end = torch.cuda.Event()
    sleep(step)
    memory.copy_(there, non_blocking=True)
    end.record()
    step.result.check("a copy to it lets the host go on", not end.query())
    end.synchronize()
    step.result.check("the bytes of a copy", bool(torch.equal(memory, there.cpu())))
    cudart: Any = torch.cuda.cudart()
    taken = registered_memory._succeeds(cudart.cudaHostRegister(memory.data_ptr(), NBYTES, 1))
    kernel = int((there[:4] + 1).sum())
    step.result.check("a refusal leaves no error for the next kernel", not taken and kernel == 10)
    del memory
    gc.collect()
    step.result.check("it is given back", registered_memory.COUNT.now == before)


def forked(step: StepRun) -> None:
    """A worker of a data loader has the memory of its parent, and may drop it."""
    import torch

    from ckptmap.storage.registered_memory import registered_memory

    held = [registered_memory(NBYTES)]
    assert held[0] is not None
    child = os.fork()
    if not child:
        held.clear()
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    step.result.check("a forked process drops it and ends", status == 0, f"status {status}")
    there = torch.full((NBYTES,), 7, dtype=torch.uint8, device=step.device)
    held[0].fill_(3)
    held[0].copy_(there, non_blocking=True)
    synchronize(step.device)
    step.result.check("the memory is the parent's still", held[0].is_pinned() and bool((held[0] == 7).all()))  # fmt: skip


def sleep(step: StepRun, seconds: float = SLEEP_S) -> None:
    """Give the device work for about so long, or longer: it counts cycles."""
    import torch

    torch.cuda._sleep(int(seconds * 2e9))


# ------------------------------------------------------------------------------- saves


def saved_with_work_ahead(step: StepRun) -> None:
    """A call of `save` of a known structure returns while the device has work of a second."""
    import torch

    import ckptmap

    model, optimizer = trained(step)
    for number in range(3):
        wanted = copied(state_of(model, optimizer))
        synchronize(step.device)
        end = torch.cuda.Event()
        sleep(step)
        end.record()
        handle = ckptmap.save(step.work / str(number), model, optimizer, step=number)
        is_ahead = not end.query()
        handle.wait()
        step.result.figure(f"save {number} with work ahead: blocked", handle.blocked_s, "s")
        if number:  # the first one of a structure asks all ranks before it returns
            step.result.check(f"save {number}: returned before the device was done", is_ahead)
    ckptmap.load(step.work / "2", model, optimizer, exact=True)
    wrong = different(wanted, state_of(model, optimizer))
    step.result.check(f"what was saved: {len(wanted)} tensors", not wrong, str(wrong[:6]))


def trained(step: StepRun) -> tuple[Any, Any]:
    """Return a model with buffers that are not saved, as rotary tables are, and its optimizer, after a step."""
    model = with_tables(step, 64 if step.is_tiny else 1024)
    optimizer = adamw(model)
    train(model, optimizer, 0, 1, step.device)
    return model, optimizer


def with_tables(step: StepRun, width: int) -> Any:
    import torch

    model = stack(3, width, step.device)
    kinds = ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
    for number, kind in enumerate(kinds):
        maker = torch.Generator().manual_seed(number)
        values = torch.randint(0, 100, (width + number,), generator=maker)
        table = values.to(getattr(torch, kind)).to(step.device)
        model[number % 3].register_buffer(f"table_{kind}", table, persistent=False)
    return model


def captured_while_saved(step: StepRun) -> None:
    """The thread that writes waits for copies while training captures a graph in torch's own mode."""
    import torch

    import ckptmap

    model, optimizer = trained(step)
    ckptmap.save(step.work / "before", model, optimizer).wait()
    values = torch.ones(1024, device=step.device).sub_(1).add_(0)  # its kernels are loaded now
    stream = torch.cuda.Stream()
    synchronize(step.device)
    sleep(step)
    handle = ckptmap.save(step.work / "meanwhile", model, optimizer)
    graph, count = torch.cuda.CUDAGraph(), 2000
    with torch.cuda.stream(stream):  # `torch.cuda.graph` would wait for the device first
        graph.capture_begin()
        for _ in range(count):
            values.add_(1)
        graph.capture_end()
    step.result.note(f"the save had ended when the graph was captured: {handle.done}")
    handle.wait()
    synchronize(step.device)
    graph.replay()
    synchronize(step.device)
    step.result.check("the graph computes", values[7].item() == count, f"{values[7].item()}")


# ------------------------------------------------------------------------------- values


def helped(step: StepRun) -> None:
    """One large tensor is filled by all threads, each of which takes blocks of it."""
    import ckptmap

    width = 64 if step.is_tiny else 16384
    model = stack(1, width, step.device)
    wanted = copied(state_of(model))
    path = step.work / "one"
    ckptmap.save(path, model, background=False)
    again = stack(1, width, step.device, seed=1)
    for verify in ("none", "stored"):
        took = min(clocked(lambda v=verify: ckptmap.load(path, again, verify=v), step.device) for _ in range(3))  # fmt: skip
        step.result.figure(f"one tensor of {4 * width * width >> 20} MiB, verify={verify!r}",
                           4 * width * width / took / 1e9, "GB/s")  # fmt: skip
    wrong = different(wanted, state_of(again))
    step.result.check("one large tensor", not wrong, str(wrong))


def casts(step: StepRun) -> None:
    """float32 into a model in float16: the CPU's bits, a value that is lost is named, and how fast it is."""
    import torch

    import ckptmap

    width, layers = (64, 2) if step.is_tiny else (8192, 8)
    model = stack(layers, width, step.device)
    edges = [65504.0, 65519.0, -65504.0, 6e-8, 2e-8, 1e-40, 0.0, -0.0, float("inf"), float("nan")]
    with torch.no_grad():
        model[0][1].weight[0, : len(edges)] = torch.tensor(edges)
    path = step.work / "float32"
    ckptmap.save(path, model, background=False)
    narrow = stack(layers, width, step.device).half()
    nbytes = sum(tensor.nbytes for tensor in state_of(model).values())
    for what, live in (("float16", narrow), ("float32", model)):
        took = min(
            clocked(lambda live=live: ckptmap.load(path, live), step.device) for _ in range(3)
        )
        step.result.figure(f"float32 into {what}", nbytes / took / 1e9, "GB/s")
    found = state_of(narrow)
    wrong = [k for k, v in state_of(model).items() if not same_bits(v.cpu().half(), found[k])]
    step.result.check(f"float32 into float16: {len(found)} tensors as the CPU casts", not wrong, str(wrong))  # fmt: skip
    with torch.no_grad():
        model[1][1].weight[3, 5] = 65520.0
    ckptmap.save(path, model, background=False, overwrite=True)
    said = "nothing was raised"
    try:
        ckptmap.load(path, narrow)
    except ckptmap.CkptmapError as error:
        said = f"{error.code} {error.message}"
    step.result.check("a value that is lost is named", said.startswith("CKM309 1.1.weight: "), said)


def frozen_base(step: StepRun) -> None:
    """The device tells which weights of a frozen base have not changed; they are not brought to the host."""
    import torch

    import ckptmap

    width, layers = (64, 2) if step.is_tiny else (8192, 8)
    model = stack(layers, width, step.device)
    path = step.work / "base"
    ckptmap.save(path, model, background=False)
    ckptmap.load(path, model)
    model.requires_grad_(False)
    model[0][0].requires_grad_(True)
    nbytes, changed = sum(tensor.nbytes for tensor in state_of(model).values()), "1.1.weight"
    wanted = {name for name, one in model.named_parameters() if one.requires_grad}
    for number in range(3):
        if number == 2:
            with torch.no_grad():
                model[1][1].weight[-1, -1] += 1
        part = step.work / f"part {number}"
        handle = ckptmap.save(part, model, only="trainable", step=number)
        handle.wait()
        rate = nbytes / handle.blocked_s / 1e9
        step.result.figure(f"save {number} over a frozen base: blocked, by the base's bytes", rate, "GB/s")  # fmt: skip
        with ckptmap.open(part) as opened:
            found = set(opened)
        expected = wanted | ({changed} if number == 2 else set())
        step.result.check(f"save {number} has what is not the base's", found == expected, str(sorted(found)[:6]))  # fmt: skip


def unsaved_buffers(step: StepRun) -> None:
    """The device computes the digests that the CPU does, and `exact` tells a buffer that was moved."""
    import ckptmap
    from ckptmap.live.model import unsaved_buffers as buffers

    model = with_tables(step, 64 if step.is_tiny else 4096)
    tables = {name: one for name, one in model.named_buffers() if "table" in name}
    kinds = {name: ["", buffers.SUM] for name in tables}
    there = buffers.begun_forms_and_digests(tables, kinds)()
    here = buffers.begun_forms_and_digests({k: v.cpu() for k, v in tables.items()}, kinds)()
    step.result.check(f"digests of {len(tables)} buffers are the CPU's", there == here)
    path = step.work / "tables"
    ckptmap.save(path, model).wait()
    ckptmap.load(path, model, exact=True)
    tables["0.table_float32"][3] += 1
    said = "it was accepted"
    try:
        ckptmap.load(path, model, exact=True)
    except ckptmap.CkptmapError as error:
        said = error.message
    step.result.check("a moved buffer is refused", "0.table_float32" in said, said)


def shared_moments(step: StepRun) -> None:
    """Moments of a shard that cuts blocks, encoded by the scales of whole blocks: the CPU's codes and scales."""
    import torch

    from benchmarks.gpu_session.equality import ascending
    from ckptmap.live.optimizer import whole_blocks
    from ckptmap.live.optimizer.family import Codes
    from ckptmap.optim.block_segments import segments_of
    from ckptmap.tensors import Box

    rows, columns = (8, 100) if step.is_tiny else (1024, 1000)
    box = Box((0, columns // 4), (rows, columns // 2))
    maker = torch.Generator().manual_seed(5)
    values = torch.randn(box.sizes, generator=maker) * 1e-3
    values[1, :30] = 0
    for bits, block in ((8, 256), (4, 128), (0, 256)):
        made = []
        for where in ("cpu", step.device):
            qmap = ascending(1 << bits).to(where) if bits else None
            packed, kind = (2 if bits == 4 else 1), torch.uint8 if bits else torch.float8_e4m3fn
            segments = segments_of((rows, columns), box, block).on(torch.device(where))
            codes = Codes(
                "", block, True, torch.zeros(-(-box.numel // packed), dtype=kind, device=where),
                torch.zeros(segments.count, device=where), qmap, box.sizes, segments=segments,
            )  # fmt: skip
            given = values.to(where)
            whole_blocks.encode(codes, given, segments.peaks(given))
            made.append(codes)
        same = all(same_bits(getattr(made[0], part), getattr(made[1], part)) for part in ("codes", "scale"))  # fmt: skip
        step.result.check(f"{bits or 'float8'}: codes and scales are the CPU's", same)


def double_quantized(step: StepRun) -> None:
    """A Linear4bit whose scales are double quantized keeps codes, scales and offset."""
    if not is_importable("bitsandbytes"):
        step.result.note("double quantization: not run: needs bitsandbytes, as such a layer does")
        return
    import torch
    from bitsandbytes.nn import Linear4bit

    import ckptmap

    def layer(seed: int) -> Any:
        torch.manual_seed(seed)
        made = Linear4bit(256, 256, bias=False, compress_statistics=True, quant_type="nf4")
        return made.to(step.device)

    one, other = layer(1), layer(2)
    path = step.work / "double"
    ckptmap.save(path, one).wait()
    ckptmap.load(path, other)
    for name in ("absmax", "offset"):
        parts = [getattr(each.weight.quant_state, name) for each in (one, other)]
        step.result.check(f"its {name}", same_bits(*parts))
    step.result.check("its codes", same_bits(one.weight.data, other.weight.data))
    given = torch.randn(4, 256, device=step.device, dtype=torch.bfloat16)
    step.result.check("its forward", same_bits(one(given), other(given)))


def compiled_numerics(step: StepRun) -> None:
    """Report how a compiled kernel's bits differ from those of operations one by one, and check that they do not with
    the options by which moments are stepped."""
    if not is_importable("triton") or not (shutil.which("cc") or shutil.which("gcc")):
        step.result.note("compiled kernels: not run: they need triton and a C compiler")
        return
    import torch

    from ckptmap.live.rounding.stepping import LIKE_EAGER

    known = torch._inductor.list_options()
    options = {name: True for name in LIKE_EAGER if name in known}
    step.result.note(f"options of inductor: {', '.join(options)}")
    maker = torch.Generator().manual_seed(6)
    a, b = (torch.randn(1 << 20, generator=maker).to(step.device) for _ in range(2))
    for name, job in NUMERICS.items():
        wanted = job(a, b).view(torch.int32)
        for what, given in (("as it is", None), ("like eager", options)):
            found = torch.compile(job, options=given, dynamic=False)(a, b).view(torch.int32)
            share = float((found != wanted).double().mean())
            step.result.figure(f"compiled, {what}: {name}: share of other bits", share)
            if given:
                step.result.check(f"compiled like eager: {name}", share == 0, f"{share}")
