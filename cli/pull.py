"""`ckptmap pull`: a checkpoint from the Hub, as it is or converted on the way."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as ask
from .printer import Printer

EXAMPLES = (
    "ckptmap pull hf://org/name model/",
    "ckptmap pull hf://org/name@v1.0 model/",
    "ckptmap pull hf://org/name out/ --to fsdp2-nf4 --world-size 8 --low-disk",
)


def command(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="hf://org/name[@revision][/folder].")
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="Where to; made complete or not at all.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="SETUP", show_default=False, help="Convert it on the way: fsdp2-nf4."
        ),
    ] = None,
    world_size: ask.WorldSize = None,
    config_from: ask.ConfigFrom = None,
    max_shard_size: ask.MaxShardSize = None,
    low_disk: Annotated[
        bool, typer.Option("--low-disk", help="With --to: keep one file of SRC at a time.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST once the new one is whole.")
    ] = False,
    no_sync: ask.NoSync = False,
    quiet: ask.Quiet = False,
    json: ask.Json = False,
) -> None:  # fmt: skip
    """Fetch a checkpoint from the Hub, every file's size and hash verified.

    Without --to files come as they are: what the index names and what lies beside it. With --to it
    is `ckptmap convert`, which has all options of a conversion. A run that was stopped is continued
    by the same command.
    """
    from ckptmap.storage.hub.resolve import silence

    out = Printer(json, quiet)
    if quiet:
        silence()
    if to is not None:
        from .convert import command as convert

        convert(
            src, dst, to=to, world_size=world_size, config_from=config_from,
            max_shard_size=max_shard_size, low_disk=low_disk, overwrite=overwrite, no_sync=no_sync,
            quiet=quiet, json=json,
        )  # fmt: skip
        return
    if (world_size, config_from, max_shard_size, low_disk) != (None, None, None, False):
        raise typer.BadParameter("options of a conversion need --to SETUP")
    import ckptmap

    report = ckptmap.pull(src, dst, overwrite=overwrite, sync=not no_sync)
    if quiet and not json:
        out.text(report.dst)
    else:
        out.show(report)
