"""`ckptmap plan`: what a conversion would do, before a byte moves."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from . import options as ask
from .printer import Printer

EXAMPLES = (
    "ckptmap plan runs/step-2000 --to fsdp2-nf4 --world-size 8",
    "ckptmap plan model.pt --to hf -o plan.json",
    "ckptmap plan hf://org/name@main --to full-nf4",
    "ckptmap convert --plan plan.json model.pt out/",
)


def command(
    src: ask.Src,
    to: ask.To,
    world_size: ask.WorldSize = None,
    include: ask.Include = None,
    exclude: ask.Exclude = None,
    drop: ask.Drop = None,
    optimizer: ask.Optimizer = "keep",
    optimizer_keys: ask.OptimizerKeys = "fqn",
    param_order: ask.ParamOrder = None,
    like: ask.Like = None,
    mesh: ask.Mesh = None,
    tp_plan: ask.TpPlan = None,
    fsdp_units: ask.FsdpUnits = None,
    use_orig_params: ask.UseOrigParams = False,
    root: ask.Root = None,
    source_root: ask.SourceRoot = None,
    wrap: ask.Wrap = None,
    names_like: ask.NamesLike = None,
    names: ask.Names = None,
    names_from: ask.NamesFrom = None,
    encode: ask.Encode = None,
    no_encode: ask.NoEncode = None,
    strict: ask.Strict = False,
    exact_scales: ask.ExactScales = False,
    base: ask.Base = None,
    max_shard_size: ask.MaxShardSize = None,
    config_from: ask.ConfigFrom = None,
    save: Annotated[
        str | None,
        typer.Option("-o", metavar="FILE", help="Save it, for `ckptmap convert --plan FILE`."),
    ] = None,
    json: ask.Json = False,
) -> None:
    """Show what a conversion would do: per tensor its way, its fidelity and its bytes.

    Reads headers only and writes nothing. Exit code 1 where a key cannot be accounted for.
    """
    import ckptmap

    from .asked import options

    asked = options(
        to, world_size=world_size, include=include, exclude=exclude, drop=drop,
        optimizer=optimizer, optimizer_keys=optimizer_keys, param_order=param_order, like=like,
        mesh=mesh, tp_plan=tp_plan, fsdp_units=fsdp_units, use_orig_params=use_orig_params,
        root=root, source_root=source_root, wrap=wrap, names_like=names_like,
        names=names, names_from=names_from,
        exact_scales=exact_scales, base=base, strict=strict,
        encode=encode, no_encode=no_encode, max_shard_size=max_shard_size, config_from=config_from,
    )  # fmt: skip
    plan = ckptmap.plan(src, to, options=asked)
    out = Printer(json)
    if save is not None:
        plan.save(save)
        again = shlex.join(("ckptmap", "convert", "--plan", save, src, "DST"))
        out.note(f"saved: {save}; run it with: {again}")
    out.show(plan)
    if plan.unresolved:
        raise typer.Exit(1)
