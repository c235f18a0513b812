"""`ckptmap push`: publish a checkpoint on the Hub; it is checked there before it is visible."""

from __future__ import annotations

from typing import Annotated

import typer

from .completion import SETUPS
from .printer import Printer
from .progress import shown
from .shared_parameters import Json, Quiet, Src
from .typed_options import TypedOptions, takes_options

EXAMPLES = (
    "ckptmap push out/ org/name",
    "ckptmap push runs/step-2000 org/name --to hf-bf16 --config-from base-model/ --private",
    "ckptmap push out/ org/name --pr",
    "ckptmap push hf://org/base org/name --to hf-bf16 --revision bf16",
)
Repo = Annotated[str, typer.Argument(metavar="REPO", help="org/name on the Hub.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SETUP",
        show_default=False,
        autocompletion=SETUPS,
        help="Setup to convert to first: hf-bf16.",
    ),
]
Private = Annotated[
    bool, typer.Option("--private", help="Make REPO private; an existing public REPO is refused.")
]
Revision = Annotated[
    str,
    typer.Option(
        "--revision",
        metavar="BRANCH",
        show_default=False,
        help="Branch to publish on; default: main.",
    ),
]
PullRequest = Annotated[bool, typer.Option("--pr", help="Leave the pull request open for review.")]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="ORG/NAME",
        show_default=False,
        help="Base model that the model card names.",
    ),
]
Work = Annotated[
    str | None,
    typer.Option(
        "--work",
        metavar="DIR",
        show_default=False,
        help="Directory to convert in, which is kept; default: one in huggingface_hub's cache.",
    ),
]


@takes_options(
    "include", "exclude", "drop", "config_from", "max_shard_size", "max_memory", "device",
    "low_disk",
    device="Device for arithmetic.",
    low_disk="From hf://: keep one file of SRC at a time.",
)  # fmt: skip
def command(
    src: Src,
    repo: Repo,
    to: To = None,
    private: Private = False,
    revision: Revision = "",
    pr: PullRequest = False,
    base_model: BaseModel = None,
    work: Work = None,
    *,
    typed: TypedOptions,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Publish a checkpoint on the Hub: all of it, or nothing.

    The files are uploaded into a pull request (with --revision: a work branch), every size and
    SHA-256 is checked there, then it is merged. The same command continues a push that was stopped,
    in the same pull request. REPO is created where there is none.
    """
    import ckptmap
    from ckptmap.storage.hub.resolve import silence

    if quiet:
        silence()
    options, how = typed.options_given(), typed.run_options()
    if options and to is None:
        raise typer.BadParameter("options of a conversion need --to SETUP")
    with shown(quiet) as progress:
        report = ckptmap.push(
            src, repo, to=to, private=private, revision=revision, pr=pr, base_model=base_model,
            work=work, device=how.device, max_memory=how.max_memory, low_disk=how.low_disk,
            progress=progress, **options,
        )  # fmt: skip
    out = Printer(json, quiet)
    if quiet and not json:
        out.text(report.commit if report.merged else report.url)
    else:
        out.show(report)
