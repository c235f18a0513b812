"""`ckptmap pull`: fetch a checkpoint from the Hub, as it is or converted on the way."""

from __future__ import annotations

from typing import Annotated

import typer

from .completion import SETUPS
from .printer import Printer
from .progress import shown
from .shared_parameters import Dst, Json, Quiet
from .typed_options import TypedOptions, takes_options

EXAMPLES = (
    "ckptmap pull hf://org/name model/",
    "ckptmap pull hf://org/name@v1.0 model/",
    "ckptmap pull hf://org/name out/ --to fsdp2-nf4 --world-size 8 --low-disk",
)


@takes_options(
    "world_size", "config_from", "max_shard_size", "low_disk", "overwrite", "sync",
    low_disk="With --to: keep one file of SRC at a time.",
)  # fmt: skip
def command(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="hf://org/name[@revision][/folder].")
    ],
    dst: Dst,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="SETUP", show_default=False, autocompletion=SETUPS, help="Setup to convert to on the way: fsdp2-nf4."
        ),
    ] = None,
    *,
    typed: TypedOptions,
    quiet: Quiet = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Fetch a checkpoint from the Hub, and check each file.

    The size and the hash of each file are compared. Without --to, files come as they are: those that the index names and those beside it. With --to
    this is `ckptmap convert`, which has all options of a conversion. The same command continues a
    run that was stopped.
    """
    from ckptmap.storage.hub.resolve import silence

    out = Printer(json, quiet)
    if quiet:
        silence()
    if to is not None:
        from .convert import command as convert

        convert(src=src, dst=dst, to=to, **typed.values, quiet=quiet, json=json)
        return
    how = typed.run_options()
    if typed.options_given() or how.low_disk:
        raise typer.BadParameter("options of a conversion need --to SETUP")
    import ckptmap

    with shown(quiet) as progress:
        report = ckptmap.pull(src, dst, overwrite=how.overwrite, sync=how.sync, progress=progress)
    if quiet and not json:
        out.text(report.dst)
    else:
        out.show(report)
