"""`ckptmap push`: a checkpoint to the Hub, proven there before anybody sees it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options as ask
from .printer import Printer

EXAMPLES = (
    "ckptmap push out/ org/name",
    "ckptmap push runs/step-2000 org/name --to hf-bf16 --config-from base-model/ --private",
    "ckptmap push out/ org/name --pr",
    "ckptmap push hf://org/base org/name --to hf-bf16 --revision bf16",
)


def command(
    src: ask.Src,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="org/name on the Hub.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SETUP", show_default=False, help="Convert it first: hf-bf16."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make REPO private; refused where it is public.")
    ] = False,
    revision: Annotated[
        str,
        typer.Option(
            "--revision", metavar="BRANCH", show_default=False, help="Publish here; default: main."
        ),
    ] = "",
    pr: Annotated[
        bool, typer.Option("--pr", help="Leave the pull request open for review.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model", metavar="ORG/NAME", show_default=False, help="For the model card."
        ),
    ] = None,
    work: Annotated[
        str | None,
        typer.Option(
            "--work", metavar="DIR", show_default=False,
            help="Convert in this directory and keep it; default: in huggingface_hub's cache.",
        ),
    ] = None,
    include: ask.Include = None,
    exclude: ask.Exclude = None,
    drop: ask.Drop = None,
    config_from: ask.ConfigFrom = None,
    max_shard_size: ask.MaxShardSize = None,
    max_memory: Annotated[
        str, typer.Option("--max-memory", metavar="SIZE", help="Bound of all buffers, 2MiB or more.")
    ] = "64MiB",
    device: Annotated[str, typer.Option("--device", help="Where arithmetic runs.")] = "cpu",
    low_disk: Annotated[
        bool, typer.Option("--low-disk", help="From hf://: keep one file of SRC at a time.")
    ] = False,
    quiet: ask.Quiet = False,
    json: ask.Json = False,
) -> None:  # fmt: skip
    """Publish a checkpoint on the Hub: all of it at once, or nothing.

    It is uploaded into a pull request (or a work branch, with --revision), every size and SHA-256
    is checked there, and then it is merged. A push that was stopped is continued by the same
    command, in the same pull request. REPO is made where there is none.
    """
    import ckptmap
    from ckptmap.storage.hub.resolve import silence

    from .progress import Progress

    if quiet:
        silence()
    shown: list[Progress] = []

    def progress(nbytes: int) -> Progress:
        shown.append(Progress(nbytes))
        return shown[0]

    options = _options(
        to, include=tuple(include or ()), exclude=tuple(exclude or ()), drop=tuple(drop or ()),
        config_from=config_from, max_shard_size=max_shard_size,
    )  # fmt: skip
    try:
        report = ckptmap.push(
            src, repo, to=to, private=private, revision=revision, pr=pr, base_model=base_model,
            work=work, device=device, max_memory=ask.parse_memory(max_memory), low_disk=low_disk,
            progress=None if quiet else progress, **options,
        )  # fmt: skip
    finally:
        for line in shown:
            line.close()
    out = Printer(json, quiet)
    if quiet and not json:
        out.text(report.url if not report.merged else report.commit)
    else:
        out.show(report)


def _options(to: str | None, **typed: Any) -> dict[str, Any]:
    """The options of a conversion that were given."""
    given = {name: value for name, value in typed.items() if value}
    if given and to is None:
        raise typer.BadParameter("options of a conversion need --to SETUP")
    if "max_shard_size" in given:
        given["max_shard_nbytes"] = ask.parse_nbytes(given.pop("max_shard_size"))
    return given
