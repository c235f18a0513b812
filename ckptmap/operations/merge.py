"""merge(): merge a LoRA adapter into its base and write the result like any other conversion.

A quantized base can be quantized again after the merge. But the steps of its grid can be larger
than what the adapter adds. So this needs `force`, and the report states how much of it survives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Unpack

from ckptmap import setups
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import HEAD
from ckptmap.checkpoint.lora.merge_adapter import merge_adapter
from ckptmap.checkpoint.lora.merged_tensor import Merged, without_adapter
from ckptmap.checkpoint.open import open, open_another
from ckptmap.checkpoint.rename import renamed
from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.formatting import counted, some
from ckptmap.core.printable import join, one_line
from ckptmap.core.quantized_codes import EncodesSome
from ckptmap.core.signatures import spelled_out
from ckptmap.errors import ArgumentError, PlanError, SourceError
from ckptmap.execution.phases import Phases
from ckptmap.mapping.renaming import Renaming
from ckptmap.operations.convert import run
from ckptmap.operations.encode_again import writes_of
from ckptmap.planning.file_plan import Encode
from ckptmap.planning.options import (
    OPTION_NAMES,
    RUN_OPTION_NAMES,
    MergeKeywords,
    MergeOptionKeywords,
    Options,
    RunOptions,
    by_kind,
    run_options_from,
)
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan
from ckptmap.planning.report import Report
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.offers import offers
from ckptmap.protocols.progress import READING
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.process_guards import one_torch_thread
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

    from ckptmap.checkpoint.lora.adapter_files import Adapter

SAMPLE_NUMEL = 1 << 18
"""Values of each tensor that are sampled."""
RUNS = 4
"""Runs of rows that a sample is taken from."""
TRIED = 4
"""Tensors that are encoded for an estimate before a byte is written."""
OPTIONS = tuple(sorted(MergeOptionKeywords.__annotations__))
"""Options of a conversion that a merge also takes."""
OWN = ("force", "adapter_config", "leave")


@dataclass(frozen=True)
class Survival:
    """How much of the change D = merged - base is left in E = written - base after quantization.

    error       |E - D| / |D|: 0 all of it; 1 as if nothing had been added
    projection  <E, D> / |D|²: the part of D that E has in its direction
    """

    error: float
    projection: float

    def __str__(self) -> str:
        return f"err/|delta| {self.error:.2f}, {self.projection:.0%} of the delta survives"


@dataclass(frozen=True, repr=False)
class MergeReport(Report):
    """What a merge did. `survival` has the merged matrices that were quantized, by FQN."""

    survival: Mapping[str, Survival] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        survival = {f: [s.error, s.projection] for f, s in self.survival.items()}
        return {**super().to_json(), "survival": survival}

    def __str__(self) -> str:
        lines = [f"delta: {fqn}: {kept}" for fqn, kept in self.survival.items()]
        return "\n".join([super().__str__(), *map(one_line, lines)])


@spelled_out(RunOptions, Options, only=MergeKeywords.__annotations__)
@tensors_on_cpu()
def merge(
    base: str | os.PathLike[str] | Checkpoint,
    adapter: str | os.PathLike[str] | Adapter,
    dst: str | os.PathLike[str],
    to: str | None = None,
    *,
    force: bool = False,
    adapter_config: str | os.PathLike[str] | None = None,
    leave: Sequence[str] = (),
    **keywords: Unpack[MergeKeywords],
) -> MergeReport:
    """Merge a LoRA adapter (rsLoRA, DoRA, modules_to_save, biases) into `base`, written to `dst`.

    to        as for `convert`; None: the setup of the base
    force     merge a quantized base back into its grid, where little of the adapter survives
    leave     patterns of modules and tensors of the adapter that are not merged
    keywords  the fields of `Options` that `MergeOptionKeywords` names, and those of `RunOptions`

    Merged in fp32 and rounded once: to the dtype of the base, or to the one that `to` names.
    Optimizer state of the base is left behind. Raises SourceError CKM320 to CKM322 where base and
    adapter do not fit, PlanError CKM323 without `force`, and as `convert` does.
    """
    plan_keywords, run_keywords = by_kind(keywords)
    run_options = run_options_from(run_keywords, "merge()")
    run_options = replace(run_options, progress=Phases.of(run_options.progress))
    Phases.of(run_options.progress).begin(READING)
    merge_plan = plan_merge(
        base, adapter, to, force=force, adapter_config=adapter_config, leave=leave, **plan_keywords
    )
    if isinstance(base, Checkpoint):
        return with_survival(merge_plan, run(merge_plan, dst, run_options))
    with merge_plan.ckpt:
        return with_survival(merge_plan, run(merge_plan, dst, run_options))


def _open_base(
    base: str | os.PathLike[str], adapter: str | os.PathLike[str] | Adapter
) -> Checkpoint:
    """Return the base. Raises SourceError CKM111 for an adapter in its place, with the right order."""
    try:
        opened = open_another(base)
    except SourceError as error:
        if error.code == "CKM111" and "peft adapter" in error.message:
            error.hint = _in_order(base, adapter) or error.hint
        raise
    hint = _in_order(base, adapter)
    if hint and _is_an_adapter(opened):
        opened.close()
        raise SourceError(
            "CKM111", f"{os.fspath(base)}: is a peft adapter without its base weights", hint
        )
    return opened


def _in_order(base: str | os.PathLike[str], adapter: str | os.PathLike[str] | Adapter) -> str:
    """Return the hint for swapped arguments; "" where the adapter is no path."""
    if not isinstance(adapter, str | os.PathLike):
        return ""
    line = join(["ckptmap", "merge", os.fspath(adapter), os.fspath(base), "DST"])
    return f"the base comes first, then the adapter: {line}"


def _is_an_adapter(ckpt: Checkpoint) -> bool:
    """Return whether peft saved these weights of an adapter alone, and not with its base."""
    if not all(name.startswith(HEAD) for name in ckpt):
        return False
    return any(".lora_" in name for name in ckpt) and not any(".base_layer." in n for n in ckpt)


@tensors_on_cpu()
def plan_merge(
    base: str | os.PathLike[str] | Checkpoint,
    adapter: str | os.PathLike[str] | Adapter,
    to: str | None = None,
    *,
    force: bool = False,
    adapter_config: str | os.PathLike[str] | None = None,
    leave: Sequence[str] = (),
    **options: Unpack[MergeOptionKeywords],
) -> Plan:
    """Return what `merge` would do. It reads values only to estimate what survives a grid."""
    for name in options:
        if name in OPTION_NAMES and name not in OPTIONS:
            raise ArgumentError(
                "CKM516",
                f"{name}: is not an option of a merge, expected one of {some(OPTIONS)}",
                "merge first, then convert the merged checkpoint with it",
            )
    argument_checks.known_keywords(options, (*OPTIONS, *RUN_OPTION_NAMES, *OWN), "merge()")
    renaming = Renaming.of(
        options.pop("strip_prefix", None),
        options.pop("rename", ()),
        options.pop("add_prefix", None),
    )
    opened = base if isinstance(base, Checkpoint) else _open_base(base, adapter)
    try:
        ckpt = renamed(opened, renaming)  # before the merge: the adapter goes by names, too
        given, to = to, to or own_setup(ckpt)
        merged = merge_adapter(
            ckpt, adapter, to, adapter_config, leave, config_from=options.get("config_from")
        )
        merge_plan = _planned(merged, given, to, options)
        quantized_again = _quantized_again(merge_plan)
        _require_encodable(quantized_again, to)
        if quantized_again and not force:
            raise _refuse_quantizing(quantized_again, to)
    except BaseException:
        if opened is not base:
            opened.close()
        raise
    return merge_plan


def _planned(merged: Checkpoint, given: str | None, to: str, options: MergeOptionKeywords) -> Plan:
    """Return the plan. A base whose format has names of its own is given back as it was (`--as`), where no other
    setup was given: its types, its metadata, and the bytes of what the adapter leaves alone."""
    aim = setups.parse(to)
    if not merged.index.naming or aim.setup.names != merged.index.naming:
        return plan(merged, to, optimizer="drop", keep_layout=False, **options)
    if given is None or aim.scheme is None:
        _require_same_heads(merged, aim.setup.name)
        return plan(merged, "", as_=merged.path, optimizer="drop", **options)
    options = {"config_from": merged.path, **options}
    return plan(merged, to, optimizer="drop", keep_layout=False, **options)


def _require_same_heads(merged: Checkpoint, setup: str) -> None:
    """Raise PlanError CKM212 where the adapter makes a head of its own, for which the base has no place."""
    for head in merged.untied:
        text = f"{merged.shown} has no {head}, which the adapter makes a tensor of its own: it cannot be given back"
        raise PlanError("CKM212", text, f"say in which blocks to write it: --to {setup}-q8_0")


def own_setup(ckpt: Checkpoint) -> str:
    """Return the setup that the checkpoint has; `hf` where no setup writes such a checkpoint, for
    example a single safetensors file."""
    if ckpt.index.naming in setups.names():
        return ckpt.index.naming
    encoded = [name for name in ckpt.encodings if name != "dense"]
    name = ckpt.setup.removesuffix("-" + "-".join(encoded)) if encoded else ckpt.setup
    return name if name in setups.names() else "hf"


def _quantizing_steps(merge_plan: Plan) -> list[Encode]:
    """Return the steps that quantize merged matrices."""
    return [
        step
        for step in merge_plan.encodes
        if step.encoding.name != "dense" and isinstance(step.tensor.encoding_, Merged)
    ]


def _quantized_again(merge_plan: Plan) -> list[Encode]:
    """Return the steps that quantize merged matrices of a quantized base; those of which another format rearranges
    the rows are derived tensors."""
    return [
        step
        for step in merge_plan.encodes
        if step.encoding.name != "dense"
        if any(
            isinstance(source.encoding_, Merged) and source.quantized
            for source in step.tensor.sources
        )
    ]


def _require_encodable(steps: Sequence[Encode], to: str) -> None:
    """Raise PlanError CKM202 where values cannot be made the codes of the base."""
    for step in steps:
        refusal = (
            step.encoding.cannot_encode(TensorInfo(step.tensor.shape, step.tensor.dtype))
            if offers(step.encoding, EncodesSome)
            else None
        )
        if refusal is not None:
            raise PlanError(
                "CKM202",
                f"{step.tensor.fqn}: is merged, and cannot be made {step.encoding.name} again: {refusal.reason}",
                f"write all in another form: --to {setups.parse(to).setup.name}-bf16 keeps what the adapter adds",
            )


def _refuse_quantizing(quantized_again: Sequence[Encode], to: str) -> PlanError:
    sampled_steps = quantized_again[:: max(1, len(quantized_again) // TRIED)][:TRIED]
    with one_torch_thread(True):
        estimates = [
            (step.tensor.fqn, estimated)
            for step in sampled_steps
            if isinstance(step.tensor.encoding_, Merged) and (estimated := _estimate(step))
        ]
    found = ""
    if estimates:
        fqn, worst = max(estimates, key=lambda estimate: estimate[1].error)
        found = (
            f" In {fqn}, the worst of {len(estimates)} that were tried, the rounding error is"
            f" {worst.error:.0%} of what the adapter changes: {worst}"
        )
    grid = quantized_again[0].encoding.name
    plain = setups.parse(to).setup.name
    return PlanError(
        "CKM323",
        f"--to {to}: {counted(len(quantized_again), 'merged tensor')} would be rounded to the {grid} grid"
        f" again, which undoes a part of what the adapter adds, or all of it.{found}",
        f"write the sum unrounded, --to {plain}-bf16; or take the error as it is, --force",
    )


# --------------------------------------------------------------------------------- survival


def with_survival(merge_plan: Plan, report: Report) -> MergeReport:
    """Return the report with the survival of each quantized matrix, measured in the output."""
    survival: dict[str, Survival] = {}
    steps = _quantizing_steps(merge_plan)
    if steps:
        with open(report.dst) as ckpt, one_torch_thread(True):
            for step in steps:
                fqn = step.tensor.fqn
                survival[fqn] = measure_survival(step, _reader_of(ckpt[fqn]))
    report_fields = {item.name: getattr(report, item.name) for item in fields(Report)}
    return MergeReport(**report_fields, survival=survival)


def _reader_of(out: LazyTensor) -> Callable[[Box, torch.Tensor], torch.Tensor]:
    return lambda box, _: out.read(box.offsets, box.sizes)


def _estimate(step: Encode) -> Survival | None:
    """Return the survival by encoding only a sample; None where the encoding refuses its shape."""
    tensor = step.tensor
    refusals = (
        isinstance(step.encoding.parts(TensorInfo(box.sizes, tensor.dtype)), Refusal)
        for box in _sample(tensor.shape)
    )
    if any(refusals):
        return None
    return measure_survival(
        step, lambda _, values: _round_trip(step.encoding, values, tensor.dtype)
    )


def measure_survival(
    step: Encode, read_written: Callable[[Box, torch.Tensor], torch.Tensor]
) -> Survival:
    """Return the survival on a sample; `read_written(box, merged)` returns the written values of a box."""
    tensor, base = step.tensor, without_adapter(step.tensor)
    squares = errors = projected = 0.0
    for box in _sample(tensor.shape):
        before = base.read(box.offsets, box.sizes).double()
        merged = tensor.read(box.offsets, box.sizes)
        delta, written_delta = merged.double() - before, read_written(box, merged).double() - before
        squares += float((delta * delta).sum())
        errors += float((written_delta - delta).square().sum())
        projected += float((written_delta * delta).sum())
    if not squares:
        return Survival(0.0, 1.0)
    return Survival((errors / squares) ** 0.5, projected / squares)


def _sample(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of whole rows, spread over the matrix."""
    columns = max(1, prod(shape[1:]))
    rows = min(shape[0], max(1, SAMPLE_NUMEL // columns))
    if rows == shape[0]:
        yield Box.whole(shape)
        return
    count = -(-rows // RUNS)
    for start in sorted({(shape[0] - count) * i // (RUNS - 1) for i in range(RUNS)}):
        yield Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))


def _round_trip(encoding: Encoding, values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the values, encoded and decoded again."""
    import torch

    info = TensorInfo(tuple(values.shape), dtype)
    encoder, infos = encoding.encoder(info, "cpu"), encoding.parts(info)
    assert not isinstance(infos, Refusal), "asked before"
    parts = {part: torch.empty(infos[part].nbytes, dtype=torch.uint8) for part in infos}
    flat, step = values.reshape(-1), -(-SAMPLE_NUMEL // encoder.step) * encoder.step
    feeds = [(at, flat[at : at + step]) for at in range(0, flat.numel(), step)]
    for write in writes_of(encoder, lambda: feeds):
        start = sum(write.box.offsets) * infos[write.part].itemsize  # boxes of writes are flat
        data = write.values.contiguous().view(-1).view(torch.uint8)
        parts[write.part][start : start + data.numel()] = data
    out = torch.empty(info.shape, dtype=getattr(torch, dtype))
    shaped = {p: parts[p].view(getattr(torch, i.dtype)).view(i.shape) for p, i in infos.items()}
    encoding.decode(info, shaped, Box.whole(info.shape), out)
    return out
