"""`ckptmap mappings`: list, show, check, test and draft naming schemes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmap.core.formatting import counted
from ckptmap.core.printable import as_lines

from .completion import SCHEMES, choices
from .printer import Printer
from .shared_parameters import Json, one_of

if TYPE_CHECKING:
    from ckptmap.mapping.catalog import CatalogEntry

EXAMPLES = (
    "ckptmap mappings list",
    "ckptmap mappings list llama",
    "ckptmap mappings show llama/meta",
    "ckptmap mappings check my-mapping.toml",
    "ckptmap mappings test my-mapping.toml --config config.json",
    "ckptmap mappings new --from hf-model/ --to runs/step-2000 --values > my-mapping.toml",
)
ACTIONS = ("list", "show", "check", "test", "new")


def command(
    action: Annotated[
        str,
        typer.Argument(
            metavar="list|show|check|test|new",
            callback=one_of(*ACTIONS),
            autocompletion=choices(*ACTIONS),
        ),
    ],
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCHEME|FILE]",
            autocompletion=SCHEMES,
            help="A scheme, as llama/meta, or a mapping file; list: also a family or model type.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="PATH", help="test: the config.json of a tiny model to test with."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="SRC", help="new: a checkpoint with Hugging Face's names."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DST", help="new: the same model with the other names."),
    ] = None,
    values: Annotated[
        bool,
        typer.Option(
            "--values", help="new: also compare values, to tell weights of equal shape apart."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """List, show, check, test or draft mapping files of names.

    A mapping file holds one naming scheme: the rules between Hugging Face's names and others.
    ckptmap/mapping/README.md describes its form. ckptmap looks for files in the
    directories of CKPTMAP_MAPPINGS, then among its own.
    """
    out = Printer(json)
    if action == "list":
        _list(out, what)
    elif action == "new":
        _new(out, source, to, values)
    else:
        if what is None:
            raise typer.BadParameter(f"{action}: give a scheme as llama/meta, or a mapping file")
        _ON_FILES[action](out, what, config)


def _list(out: Printer, selector: str | None) -> None:
    from ckptmap.mapping.catalog import select

    entries = select(selector)
    if out.json:
        document = [
            {"scheme": entry.title, "models": list(entry.models), "summary": entry.summary,
             "path": entry.path, "same_as": entry.same_as}
            for entry in entries
        ]  # fmt: skip
        out.document({"mappings": document})
        return
    width = max((len(entry.title) for entry in entries), default=0)
    out.text(as_lines(f"{entry.title:<{width}}  {_summarize(entry)}" for entry in entries))


def _summarize(entry: CatalogEntry) -> str:
    return entry.summary + (f" (= {entry.family}/{entry.same_as})" if entry.same_as else "")


def _find_path(scheme: str) -> str:
    from ckptmap.errors import PlanError
    from ckptmap.mapping.catalog import find

    matches = find(scheme, option="")
    if len({entry.family for entry in matches}) > 1:
        raise PlanError(
            "CKM604",
            f"{scheme!r} could be {', '.join(entry.title for entry in matches)}",
            f"say which, for example {matches[0].title}",
        )
    return matches[0].path


def _show(out: Printer, scheme_or_file: str, config: str | None) -> None:
    from ckptmap.mapping.mapping_file import load_scheme

    scheme = load_scheme(_find_path(scheme_or_file))
    if out.json:
        rules = [_rule_document(rule) for rule in scheme.rules]
        out.document({"scheme": scheme.title, "models": list(scheme.models), "rules": rules})
    else:
        out.text(scheme.text.rstrip())


def _rule_document(rule: Any) -> Mapping[str, object]:
    def side(terms: Any) -> list[str]:
        return [
            " | ".join(name.text for name in term.names)
            + ("" if term.axes is None else f" :: {term.axes.text}")
            for term in terms
        ]

    return {"hf": side(rule.hub), "other": side(rule.other), "rename": rule.is_rename}


def _check(out: Printer, scheme_or_file: str, config: str | None) -> None:
    from ckptmap.mapping.mapping_file import load_scheme

    scheme = load_scheme(_find_path(scheme_or_file))
    renames = sum(rule.is_rename for rule in scheme.rules)
    if out.json:
        out.document({"ok": True, "scheme": scheme.title, "rules": len(scheme.rules)})
        return
    out.text(
        f"ok: {scheme.title}: {counted(len(scheme.rules), 'rule')}, {renames} of them renames; same axes on both"
        " sides, slices tile, one rule a key, there and back is the identity"
    )


def _test(out: Printer, scheme_or_file: str, config: str | None) -> None:
    from contextlib import closing

    from ckptmap.mapping.model_config import read_config
    from ckptmap.protocols.file_systems import Mounts
    from ckptmap.testing.mappings import MappingKit

    with closing(Mounts()) as mounts:
        kit = MappingKit(
            _find_path(scheme_or_file), None if config is None else read_config(config, mounts)
        )
    results = []
    for name, arguments in kit.checks():
        title = name + (f"[{','.join(arguments)}]" if arguments else "")
        try:
            kit.check(name, *arguments)
            results.append({"check": title, "ok": True, "why": ""})
        except AssertionError as error:
            results.append({"check": title, "ok": False, "why": str(error)})
    failed = [result for result in results if not result["ok"]]
    if out.json:
        out.document({"ok": not failed, "file": scheme_or_file, "checks": results})
    else:
        lines = [
            f"{'ok' if r['ok'] else 'FAILED':<7}{r['check']}  {r['why']}".rstrip() for r in results
        ]
        out.text(as_lines([*lines, f"{len(results) - len(failed)} of {len(results)} passed"]))
    if failed:
        raise typer.Exit(1)


def _new(out: Printer, source: str | None, to: str | None, values: bool) -> None:
    from ckptmap.operations.draft_mapping import draft

    if source is None or to is None:
        raise typer.BadParameter("new: give --from SRC and --to DST, two checkpoints of one model")
    new_mapping = draft(source, to, values=values)
    if out.json:
        out.document(new_mapping.to_json())
        return
    out.text(str(new_mapping).rstrip())
    out.note(f"{new_mapping.summary}; prove it with: ckptmap mappings check FILE")


_ON_FILES: Mapping[str, Callable[[Printer, str, str | None], None]] = {
    "show": _show, "check": _check, "test": _test,
}  # fmt: skip
