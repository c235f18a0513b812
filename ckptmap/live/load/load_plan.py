"""The plan of a load of weights: a step for every tensor, and what does not match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptmap.checkpoint.lora.adapter_files import HEAD
from ckptmap.core.formatting import counted, some
from ckptmap.errors import LoadError
from ckptmap.live.model import peft
from ckptmap.live.model.collective_errors import explain
from ckptmap.live.model.live_form import LoadStep
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import (
    SHOWN,
    CastTensor,
    Decoded,
    Encoded,
    LoadReport,
    Mismatch,
)
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.model.tensor_reader import TensorReader

Step = Callable[[TensorReader], None]


@dataclass
class LoadPlan:
    """The steps of a load, and the tensors that it cannot fill.

    steps      one for each of `targets`, in order
    unfit      the targets of `mismatched`
    left       targets that keep their values, because the source need not have them
    refused    keys of the checkpoint that cannot be read, with the reason
    becomes    (class, dtype) of the local tensors that take the place of others, by FQN
    trainable  names of weights that require gradients and must not, by the form that holds them
    """

    steps: list[Step] = field(default_factory=list)
    targets: list[LiveTensor] = field(default_factory=list)
    missing: list[LiveTensor] = field(default_factory=list)
    left: list[LiveTensor] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    unfit: list[LiveTensor] = field(default_factory=list)
    becomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    trainable: dict[str, list[str]] = field(default_factory=dict)
    cast: list[CastTensor] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, target: LiveTensor, step: LoadStep) -> None:
        """Add the step of one tensor."""
        self.targets.append(target)
        self.steps.append(step.run)
        if step.cast is not None:
            self.cast.append(step.cast)
        if step.encoded is not None:
            self.encoded.append(step.encoded)
        if step.decoded is not None:
            self.decoded.append(step.decoded)
        if step.quantizes:
            self.quantized.append(target.fqn)
        if step.becomes is not None:
            self.becomes[target.fqn] = step.becomes

    def refuse(
        self,
        path: str,
        strict: bool,
        strict_encoding: bool,
        buffers_on_meta: Sequence[str],
        mend: Callable[[], str] = str,
    ) -> None:
        """Raise LoadError for what must not be loaded: names first, then shapes, then encodings.

        `mend` returns the arguments that make names match, as a hint; "": none do.
        """
        if strict:
            self._refuse_names(path, buffers_on_meta, mend)
            peft.refuse_values_of_another_base(self.left, path)
            self._refuse_shapes(path)
        elif self.missing and not self.steps:
            self._refuse_nothing(path, mend)
        for title, names in self.trainable.items():
            raise LoadError(
                "CKM503",
                f"{path}: {title} weights are trainable in the model, expected requires_grad=False: "
                + some(names),
                "freeze them, or load a checkpoint converted with --to hf-bf16",
            )
        if self.decoded and strict_encoding:
            raise LoadError(
                "CKM504",
                f"{path}: {counted(len(self.decoded), 'quantized weight')} must be decoded to fit the model: "
                + some(self.decoded),
                "change the world size, or pass strict_encoding=False",
            )

    def _refuse_names(
        self, path: str, buffers_on_meta: Sequence[str], mend: Callable[[], str]
    ) -> None:
        missing = [target.fqn for target in self.missing]
        if missing or self.unexpected:
            seen = []
            if missing:
                seen.append(f"{len(missing)} missing: {some(missing)}")
            if self.unexpected:
                seen.append(f"{len(self.unexpected)} unexpected: {some(self.unexpected)}")
            if self.refused:
                seen.append(f"not readable: {some(self.refused)}")
            raise LoadError(
                "CKM501",
                f"{path}: keys do not match the model, {'; '.join(seen)}",
                _wrapped(missing, self.unexpected) or mend() or _way_out(missing, self.unexpected),
            )
        if buffers_on_meta:
            raise LoadError(
                "CKM501",
                "model: non-persistent buffers are on meta and in no checkpoint:"
                f" {some(buffers_on_meta)}",
                "build the model with its buffers on a device (accelerate's init_empty_weights, then "
                "tie_weights), or compute them and load with strict=False",
            )

    def _refuse_nothing(self, path: str, mend: Callable[[], str]) -> None:
        """Raise LoadError where strict=False would leave the whole model as it is, without a word."""
        missing = [target.fqn for target in self.missing]
        raise LoadError(
            "CKM501",
            f"{path}: none of the model's {len(missing)} tensors is in it, expected at least one"
            f" although strict=False; the model has {some(missing)}; it has {some(self.unexpected)}",
            mend()
            or "load a checkpoint of this model, or give it the model's names first:"
            " ckptmap convert SRC DST --to full --names FILE",
        )

    def _refuse_shapes(self, path: str) -> None:
        if self.mismatched:
            raise LoadError(
                "CKM502",
                f"{path}: {counted(len(self.mismatched), 'tensor', 'does', 'do')} not fit: {some(self.mismatched)}",
                GROWN
                if all(target.is_buffer for target in self.unfit)
                and all(one.has_other_shape for one in self.mismatched)
                else "build the model of this checkpoint, or load with strict=False",
            )

    def run(self, reader: TensorReader) -> None:
        """Run every step. An error says which tensors have the checkpoint's values by then."""
        done = 0
        try:
            sizes = (target.local.nbytes for target in self.targets)
            for _ in reader.run_all(self.steps, sizes):
                done += 1
        except Exception as error:
            if done == len(self.steps):  # what a device is asked of at the end
                explain(error, f"all {counted(done, 'tensor')} of the model are filled")
                raise
            loaded, now = [t.fqn for t in self.targets[:done]], self.targets[done].fqn
            names = f": {some(loaded)}" if loaded else ""
            text = (
                f"the model is half loaded, {done} of {counted(len(self.steps), 'tensor')}{names}"
            )
            others = " and others" if reader.threads > 1 else ""
            explain(error, f"{text}; {now}{others} may be in part", now)
            raise

    def report(self, reader: TensorReader, buffers_on_meta: Sequence[str]) -> LoadReport:
        """Return the report of the weights, after every step has run."""
        without = [*self.missing, *self.unfit, *self.left]
        empty = [target.fqn for target in without if target.local.is_meta]
        ties = [(name, t.fqn) for t in self.targets for name in t.names[1:]]
        return LoadReport(
            loaded=tuple(target.fqn for target in self.targets),
            missing=tuple(target.fqn for target in self.missing),
            left=tuple(target.fqn for target in self.left),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(self.mismatched),
            cast=tuple(self.cast),
            encoded=tuple(self.encoded),
            decoded=tuple(self.decoded),
            quantized=tuple(self.quantized),
            tied=tuple(ties),
            left_on_meta=(*empty, *buffers_on_meta),
            peak_host_nbytes=reader.meter.peak_host_nbytes,
            peak_device_nbytes=reader.meter.peak_device_nbytes,
        )


GROWN = (
    "buffers that take their shape in a forward, as those of observers do, have it after one: run a batch, then load"
    " again; or load with strict=False"
)
WRAP = "wrap the model by get_peft_model first, or load what `ckptmap merge` makes of it"


def _wrapped(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return the hint for what a wrapped model saved with its adapter, "" for all else: without peft's
    prefix the base's names match, and the adapter would be left out."""
    live, saved = (any(n.startswith(HEAD) for n in ns) for ns in (missing, unexpected))
    adapted = any(".base_layer." in name for name in unexpected)
    return WRAP if saved and adapted and not live else ""


def _way_out(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return the hint for names that do not match. peft puts `base_model.model.` before all names, and
    a model that it has not wrapped has no module for an adapter's tensors."""
    live, saved = (any(n.startswith(HEAD) for n in ns) for ns in (missing, unexpected))
    if saved and not live:
        return WRAP
    if not missing:
        others = "; also where other ranks have them, as stages of a pipeline"
        return (
            f"leave out what the model does not have: drop={list(unexpected[:SHOWN])!r}, or strict=False"
            + (others if rank_and_world()[1] > 1 else "")
        )
    return "load with strict=False to take what matches, or give names with rename=['OLD=NEW']"
