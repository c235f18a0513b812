"""Every option of a command is a keyword of the Python call, by the same name."""

from __future__ import annotations

import importlib
import inspect
import keyword
from collections.abc import Callable
from typing import get_args

import pytest
import typer.models

import ckptmap
from ckptmap.planning.options import ALIASES

CALLS: dict[str, Callable[..., object]] = {
    "plan": ckptmap.plan,
    "convert": ckptmap.convert,
    "merge": ckptmap.merge,
    "push": ckptmap.push,
    "pull": ckptmap.pull,
    "verify": ckptmap.verify,
    "diff": ckptmap.diff,
    "inspect": ckptmap.open,
}
OF_THE_TERMINAL = {"json", "quiet", "dry_run"}
"""Options about what is printed. `dry_run` is `ckptmap.plan`."""
OF_OPEN = {"source_root", "like", "param_order"}
"""Python gives these to `open`, and the checkpoint that it returns to the call."""
ELSEWHERE = {
    "plan": {"o": "Plan.save"},
    "convert": {"plan": "saved_plan.replan", "rank_timeout": "ranks.join"},
    "inspect": {"keys": "a slice of the Mapping", "shards": "LazyTensor.parts"},
    "pull": dict.fromkeys(
        ("to", "world_size", "config_from", "max_shard_size", "max_shard_nbytes", "low_disk"),
        "convert, whose source is on the Hub",
    ),
}
"""Options of a command that another call has."""


def option_names(command: str) -> set[str]:
    """The names of a command's options as Python writes them: `--world-size` -> `world_size`; of a
    flag with an opposite, the positive one."""
    names: set[str] = set()
    function = importlib.import_module(f"ckptmap_cli.{command}").command
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        about = get_args(parameter.annotation)[1] if get_args(parameter.annotation) else None
        if isinstance(about, typer.models.OptionInfo):
            # In an annotation typer takes the first name as the default.
            typed = (about.default, *(about.param_decls or ()))
            given = [name for name in typed if isinstance(name, str)]
            given = given or [f"--{parameter.name.replace('_', '-')}"]
            long = [text.partition("/")[0] for text in given if text.startswith("--")]
            written = {text.lstrip("-").replace("-", "_") for text in long or given}
            names |= {f"{name}_" if keyword.iskeyword(name) else name for name in written}
    return names


@pytest.mark.parametrize("command", CALLS)
def test_names_agree(command: str) -> None:
    keywords = {*inspect.signature(CALLS[command]).parameters}
    keywords |= {alias for alias, field in ALIASES.items() if field in keywords}
    if command in ("verify", "diff"):
        keywords |= OF_OPEN
    names = option_names(command)
    assert names - keywords - OF_THE_TERMINAL == {*ELSEWHERE.get(command, {})}


def test_the_options_are_seen() -> None:
    assert {"max_shard_size", "max_shard_nbytes", "sync", "encode", "quantize"} <= option_names(
        "convert"
    )


OF_PYTHON = {
    "plan": {"source", "options"},
    "convert": {"src", "dst", "progress", "ranks"},
    "merge": {"base", "adapter", "dst", "progress"},
    "diff": {"a", "b", "progress"},
    "verify": {"path", "progress", "threads"},
    "inspect": {"path", "param_order", "root"},
    "pull": {"src", "dst", "progress"},
}
"""Keywords that are no options: arguments of the command, what a program alone has a use for, and the
`root` of `open`, which is --source-root."""


@pytest.mark.parametrize("command", OF_PYTHON)
def test_every_keyword_is_an_option(command: str) -> None:
    keywords = {*inspect.signature(CALLS[command]).parameters}
    assert keywords - option_names(command) == OF_PYTHON[command]


def test_load_has_the_names_of_convert() -> None:
    """What means the same is called the same; `load` has no other word for it."""
    load = inspect.signature(ckptmap.load).parameters
    convert = inspect.signature(ckptmap.convert).parameters
    alike = {"strip_prefix", "rename", "add_prefix", "drop"}
    # `strict` and `optimizer` are those of torch, `max_memory` states its default, `base` lies elsewhere.
    assert load.keys() & convert.keys() == {*alike, "max_memory", "strict", "optimizer", "base"}
    for name in alike:
        assert load[name].default == convert[name].default, name
    assert {"strip_prefix", "rename", "add_prefix"} <= option_names("diff") & option_names(
        "inspect"
    )
