"""`ckptmap plan`: show what a conversion would do."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptmap.core.printable import join

from .inspect_without_typer import shown_on_a_terminal
from .printer import Printer
from .shared_parameters import Json, NoProgress, Src, To
from .typed_options import PLAN_OPTIONS, TypedOptions, takes_options

EXAMPLES = (
    "ckptmap plan runs/step-2000 --to fsdp2-nf4 --world-size 8",
    "ckptmap plan model.pt --to hf -o plan.json",
    "ckptmap plan hf://org/name@main --to full-nf4",
    "ckptmap convert --plan plan.json model.pt out/",
)


@takes_options(*PLAN_OPTIONS)
def command(
    src: Src,
    to: To = None,
    *,
    typed: TypedOptions,
    save: Annotated[
        str | None,
        typer.Option(
            "-o", metavar="FILE", help="Save the plan, for `ckptmap convert --plan FILE`."
        ),
    ] = None,
    quiet: NoProgress = False,
    json: Json = False,
) -> None:
    """Show what a conversion would do: source, target, fidelity and bytes of each tensor.

    It reads headers only and writes nothing. The exit code is 1 where the plan cannot account for a
    key of SRC.
    """
    import ckptmap

    options = typed.options(to or "")
    if not options.to and options.as_ is None:
        raise typer.BadParameter("give --to SETUP, or --as PATH")
    out = Printer(json)
    with shown_on_a_terminal(quiet):
        plan = ckptmap.plan(src, options.to, options=options)
        show_plan = out.prepared(plan)
    with plan.ckpt:
        if save is not None:
            plan.save(save)
            again = join(("ckptmap", "convert", "--plan", save, src, "DST"))
            out.note(f"saved: {save}; run it with: {again}")
        show_plan()
    if plan.unresolved:
        raise typer.Exit(1)
