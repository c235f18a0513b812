"""Keywords of Python calls: the fields of the options, neither more nor less, of the same types."""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import ckptmap
from ckptmap.errors import ArgumentError
from ckptmap.live.options import LoadOptions
from ckptmap.planning.options import (
    ALIASES,
    OPTION_NAMES,
    RUN_OPTION_NAMES,
    ConvertKeywords,
    MergeKeywords,
    MergeOptionKeywords,
    OptionKeywords,
    Options,
    RunOptionKeywords,
    RunOptions,
    Size,
    options_from,
)


def stored(kind: Any) -> Any:
    """What an option of this type is stored as: any path as str, any sequence as a tuple, a size as
    bytes; True, of patterns, as the pattern of all names; a dict of names as patterns."""
    if kind in (Size, Size | None):
        return int if kind == Size else int | None
    if get_origin(kind) is Sequence:
        return tuple[stored(get_args(kind)[0]), ...]
    if not isinstance(kind, types.UnionType) and get_origin(kind) is not Union:
        return kind
    given = [member for member in get_args(kind) if member != os.PathLike[str]]
    members = [stored(member) for member in given if get_origin(member) is not Mapping]
    if tuple[str, ...] in members:
        members = [member for member in members if member is not bool]
    return Union[tuple(members)]  # noqa: UP007 (made of a list)


def test_keywords_of_a_plan_are_its_options() -> None:
    of_class = get_type_hints(Options)
    del of_class["to"]
    of_call = {name: stored(kind) for name, kind in get_type_hints(OptionKeywords).items()}
    other_names = {name: of_call.pop(name) for name in ALIASES}
    assert other_names == {name: of_class[field] for name, field in ALIASES.items()}
    assert of_call == of_class
    assert set(OPTION_NAMES) == set(of_class)


def test_keywords_of_a_run_are_its_options() -> None:
    of_call = {name: stored(kind) for name, kind in get_type_hints(RunOptionKeywords).items()}
    assert of_call == get_type_hints(RunOptions)
    assert tuple(RunOptionKeywords.__annotations__) == RUN_OPTION_NAMES


def test_convert_and_merge_take_both() -> None:
    assert set(ConvertKeywords.__annotations__) == {*OPTION_NAMES, *RUN_OPTION_NAMES, *ALIASES}
    of_merge = {*MergeOptionKeywords.__annotations__, *RUN_OPTION_NAMES}
    assert set(MergeKeywords.__annotations__) == of_merge
    for keywords in (OptionKeywords, RunOptionKeywords, ConvertKeywords, MergeKeywords):
        assert not keywords.__required_keys__


UNKNOWN: dict[str, tuple[Callable[[], object], str]] = {
    "plan": (
        lambda: ckptmap.plan("x", "hf", wrold_size=3),
        r"wrold_size: is not an argument of plan\(\), expected world_size",
    ),
    "convert": (
        lambda: ckptmap.convert("x", "y", "hf", thraeds=3),
        r"thraeds: is not an argument of convert\(\), expected threads",
    ),
    "merge": (
        lambda: ckptmap.merge("x", "y", "z", wrold_size=3),
        r"wrold_size: is not an argument of merge\(\), expected world_size",
    ),
    "merge, which leaves names": (
        lambda: ckptmap.merge("x", "y", "z", names="hf"),
        "names: is not an option of a merge, expected one of add_prefix, config_from",
    ),
    **{
        call.__name__: (
            partial(call, *arguments, **{wrong: 1}),
            rf"{wrong}: is not an argument of {call.__name__}\(\), expected {nearest};",
        )
        for call, arguments, wrong, nearest in (
            (ckptmap.open, ("x",), "source_roots", "source_root"),
            (ckptmap.load, ("x", torch.nn.Linear(2, 2)), "sead", "seed"),
            (ckptmap.save, ("x", torch.nn.Linear(2, 2)), "over_write", "overwrite"),
            (ckptmap.diff, ("x", "y"), "value", "values"),
            (ckptmap.verify, ("x",), "agianst", "against"),
            (ckptmap.push, ("x", "org/name"), "wrold_size", "world_size"),
            (ckptmap.pull, ("hf://org/name", "x"), "overwritten", "overwrite"),
            (ckptmap.translate, ({},), "encodings", "encoding"),
            (ckptmap.hooks.install, (torch.nn.Linear(2, 2),), "optimiser", "optimizer"),
        )
    },
    "not at all": (
        lambda: ckptmap.plan("x", "hf", zzz=3),
        r"zzz: is not an argument of plan\(\), expected one of add_prefix, as_, base, ",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(name: str) -> None:
    call, message = UNKNOWN[name]
    with pytest.raises(ArgumentError, match=message) as refused:
        call()
    assert refused.value.code == "CKM516"


def test_paths_and_patterns_are_stored_in_one_form() -> None:
    given = Options("hf", drop="a.*", include=["b"], like=Path("c"), exact_scales=True, wrap="d,e")
    plain = Options(
        "hf", drop=("a.*",), include=("b",), like="c", exact_scales=("*",), wrap=("d", "e")
    )
    assert given == plain
    assert Options("hf", exact_scales=False) == Options("hf")


def test_sizes_are_bytes_or_text() -> None:
    assert RunOptions(max_memory="64MiB") == RunOptions(max_memory=64 << 20)
    assert Options("hf", max_shard_nbytes="2GB").max_shard_nbytes == 2 * 10**9
    assert LoadOptions.of({"max_memory": "3MiB"}).max_memory == 3 << 20
    assert RunOptions(max_memory=None) == RunOptions()
    for wrong in ("64 elephants", "", 0, -1, 1.5, [64]):
        with pytest.raises(ArgumentError, match=r"max_memory=.*, expected "):
            RunOptions(max_memory=wrong)
        with pytest.raises(ArgumentError, match=r"max_memory=.*, expected "):
            LoadOptions.of({"max_memory": wrong})


@pytest.mark.parametrize("call", [ckptmap.convert, ckptmap.merge])
def test_less_memory_than_one_thread_holds_is_refused_as_on_the_command_line(call: Any) -> None:
    with pytest.raises(ArgumentError, match="max_memory='1MiB', expected 2MiB or more"):
        call("a", "b", "c", max_memory="1MiB")


@pytest.mark.parametrize("name, field", [*ALIASES.items(), ("drop", "drop")])
def test_an_error_names_an_argument_as_it_was_given(name: str, field: str) -> None:
    wrong: Any = {name: 0 if "shard" in name else 5}
    with pytest.raises(ArgumentError, match=rf"^{name}="):
        ckptmap.plan("a", to="hf", **wrong)
    with pytest.raises(ArgumentError, match=rf"^{name}="):
        ckptmap.convert("a", "b", to="hf", **wrong)
    with pytest.raises(ArgumentError, match=rf"^{field}="):
        ckptmap.convert("a", "b", to="hf", **{field: wrong[name]})


def test_an_option_has_one_value_by_either_name() -> None:
    assert options_from(
        "hf", {"max_shard_size": "2GB", "quantize": "a", "keep": "b"}, "plan()"
    ) == Options("hf", max_shard_nbytes=2 * 10**9, encode=("a",), no_encode=("b",))
    with pytest.raises(
        ArgumentError, match=r"^encode='b': is encode by another name, expected one"
    ):
        ckptmap.plan("x", "hf", quantize="a", encode="b")


def test_tab_completion_shows_the_public_names() -> None:
    assert dir(ckptmap) == sorted({*ckptmap.__all__, "hooks", "integrations", "ranks"})


def test_every_option_is_explained_where_it_is_stated() -> None:
    import ast
    import inspect

    for kind in (Options, RunOptions):
        body = ast.parse(inspect.getsource(kind)).body[0].body
        explained = {
            stated.target.id
            for stated, text in itertools.pairwise(body)
            if isinstance(stated, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        assert explained == {field.name for field in fields(kind)}
