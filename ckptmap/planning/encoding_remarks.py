"""Notes for the user about encodings: weights that stay as they are, and weights that lose their ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.printable import advised
from ckptmap.core.tensor_table import listed
from ckptmap.planning.conversion import Steps
from ckptmap.planning.layout_builder import TensorLayout
from ckptmap.planning.options import Options
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.planning.weight_encodings import ROUND, WeightEncodings
from ckptmap.protocols import Refusal, Scheme
from ckptmap.tensors import TensorInfo


def encoding_remarks(
    request: Request,
    layout: TensorLayout,
    encodings: WeightEncodings,
    dropped: Mapping[str, str],
    tied: Mapping[str, str],
) -> Remarks:
    """Return notes on what the options did not do; with --strict, these are unresolved, too."""
    ckpt, scheme, options = request.ckpt, request.aim.scheme, request.options
    untied = _untied(ckpt, {**dropped, **tied})
    left = encodings.left_by_shape
    empty = {} if left else _encodes_nothing(layout.steps, scheme, options)
    notes = [
        *listed("tied, written under each name", untied),
        *listed("stays as it is", {**left, **encodings.beside_ties}),
        *(f"{reason}: name weights with --encode GLOB" for reason in empty.values()),
    ]
    if not options.strict:
        return Remarks(notes=notes)
    unresolved = [
        *_strictly(left, lambda key: f"leave it as it is with {advised(no_encode=key)}"),
        *_strictly(empty, lambda key: "name weights with --encode GLOB"),
    ]
    return Remarks(unresolved=unresolved, notes=notes)


def _strictly(reasons: Mapping[str, str], hint: Callable[[str], str]) -> list[Unresolved]:
    return [
        Unresolved(key, reason, f"{hint(key)}, or convert without --strict")
        for key, reason in reasons.items()
    ]


def _untied(ckpt: Checkpoint, left_out: Mapping[str, str]) -> dict[str, str]:
    """Return the names of one tensor that become tensors of their own, because the target knows no
    ties: each with the first of them."""
    firsts: dict[str, str] = {}
    for names in ckpt.sharing():
        written = [fqn for fqn in names if fqn not in left_out]
        firsts.update({fqn: written[0] for fqn in written[1:]})
    return firsts


def _encodes_nothing(steps: Steps, scheme: Scheme | None, options: Options) -> dict[str, str]:
    """Return the scheme with a reason where it takes no weight: Conv1D modules, weights that are
    quantized already, or patterns that leave none."""
    if scheme is None:
        return {}
    probe = scheme.encoding(TensorInfo((ROUND, ROUND), "float32"))
    if isinstance(probe, Refusal) or probe.name == "dense":  # a cast takes what it can
        return {}
    targets = {kind.target for kind in steps.counted() if kind.role == "model"}
    if not targets or any(target.partition("(")[0] == scheme.name for target in targets):
        return {}
    options_given = [name for name in ("encode", "no_encode") if getattr(options, name)]
    by = " and ".join(f"--{name.replace('_', '-')}" for name in options_given) or "default"
    kinds = ", ".join(sorted(targets))
    reason = f"no weight becomes {scheme.name} by {by}, all stay as they are ({kinds})"
    return {scheme.name: reason}
