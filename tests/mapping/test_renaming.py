"""Names change by path segment and as whole keys; no two become one, and nothing is done in vain."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from hypothesis import given
from hypothesis import strategies as st

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError, PlanError
from ckptmap.mapping.renaming import Renaming
from tests.support.examples import examples

RENAMED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"strip_prefix": "student"}, {"student.a.w": "a.w", "teacher.a.w": "teacher.a.w"}),
    ({"strip_prefix": "student."}, {"student.a": "a", "students.a": "students.a"}),
    ({"strip_prefix": "model._orig_mod"}, {"model.a": "a"}),
    ({"strip_prefix": "a.b"}, {"a.b.c": "c", "a.bc.d": "a.bc.d"}),
    ({"add_prefix": "net."}, {"a.w": "net.a.w", "net.b": "net.net.b"}),
    ({"add_prefix": "module"}, {"a.w": "module.a.w"}),
    ({"rename": "student.{x}={x}"}, {"student.a.b.w": "a.b.w", "student": "student"}),
    ({"rename": ["fc.weight = head.weight"]}, {"fc.weight": "head.weight", "fc.bias": "fc.bias"}),
    ({"rename": {"{x}.gamma": "{x}.weight"}}, {"a.b.gamma": "a.b.weight", "gamma": "gamma"}),
    (
        {"rename": ["enc.{n}.att.{x}=layers.{n}.attn.{x}", "enc.{n}.ln.{x}=layers.{n}.norm.{x}"]},
        {"enc.0.att.q.w": "layers.0.attn.q.w", "enc.11.ln.w": "layers.11.norm.w"},
    ),
    ({"rename": "a.{x}.{y}=b.{x}.{y}"}, {"a.1.2.3": "b.1.2.3", "a.1": "a.1"}),
    ({"rename": ["a.{x}=b.{x}", "b.{x}=a.{x}"]}, {"a.w": "b.w", "b.w": "a.w"}),
    ({"rename": "{a}.of.{b}={b}.in.{a}"}, {"x.y.of.z": "z.in.x.y"}),
    (
        {"strip_prefix": "s", "rename": "a.{x}=b.{x}", "add_prefix": "net"},
        {"s.a.w": "net.b.w", "a.v": "net.b.v", "c": "net.c"},
    ),
]


@pytest.mark.parametrize(("given", "names"), RENAMED)
def test_names_of_keys(given: dict[str, Any], names: dict[str, str]) -> None:
    renaming = Renaming.of(**given)
    assert renaming.names(list(names), "x") == names
    assert Renaming.recorded(renaming.record()) == renaming
    one = renaming.lenient({})
    assert {key: one(key) for key in names} == names


REFUSED: list[tuple[dict[str, Any], list[str], str, str]] = [
    ({"strip_prefix": "stu"}, ["student.a"], "CKM618", "no name begins with 'stu.', the first is 'stud"),
    ({"rename": "b.{x}={x}"}, ["a.w"], "CKM618", "matches no name, the first is 'a.w'"),
    ({"rename": ["a.{x}={x}", "b={x}"]}, ["a.w"], "CKM618", "{x} is on one side only"),
    ({"rename": "a.{x}=b"}, ["a.w"], "CKM618", "{x} is on one side only"),
    ({"rename": "{x}.{x}={x}"}, ["a.w"], "CKM618", "has the capture {x} twice on one side"),
    ({"rename": "a.{x}"}, ["a.w"], "CKM618", "expected OLD=NEW with one '='"),
    ({"rename": "a=b=c"}, ["a.w"], "CKM618", "expected OLD=NEW with one '='"),
    ({"rename": "a.{x}=>b.{x}"}, ["a.w"], "CKM618", "'>b.{x}' begins with '>', expected OLD=NEW"),
    ({"rename": "a.*={x}"}, ["a.w"], "CKM618", "the segment '*' is not a capture"),
    ({"rename": "a.l{n}=l{n}"}, ["a.l1"], "CKM618", "the segment 'l{n}' is not a capture"),
    ({"rename": "a..b=c"}, ["a.w"], "CKM618", "the segment '' is empty"),
    ({"rename": "{a}.b.{c}={c}.{a}"}, ["x.b.b.y"], "CKM618", "'x.b.b.y' matches in two ways"),
    (
        {"rename": ["a.{x}=b.{x}", "{x}.w={x}.v"]}, ["a.w"], "CKM618",
        "'a.w' matches --rename 'a.{x}=b.{x}', as 'b.w', and --rename '{x}.w={x}.v', as 'a.v'",
    ),
    ({"strip_prefix": "s"}, ["s.a", "a"], "CKM114", "'s.a' and 'a' would both become 'a'"),
    ({"rename": "a.{x}=b.{x}"}, ["a.w", "b.w"], "CKM114", "'a.w' and 'b.w' would both become 'b.w'"),
    ({"strip_prefix": "a"}, ["a."], "CKM618", "'a.' would become '', which is empty"),
    ({"rename": "a.{x}=_orig_mod.{x}"}, ["a.w"], "CKM618", "is the segment of a wrapper, compile"),
    ({"add_prefix": "_orig_mod"}, ["a.w"], "CKM618", "readers take the segment '_orig_mod'"),
    ({"strip_prefix": ""}, ["a.w"], "CKM618", "expected segments of a name"),
    ({"add_prefix": "a..b"}, ["a.w"], "CKM618", "expected segments of a name"),
    ({"rename": "{a}.x.{b}={b}.{a}"}, ["a." * 65 + "x.c"], "CKM618", "has 67 segments, expected at most"),
    ({"strip_prefix": 3}, ["a.w"], "CKM516", "strip_prefix=3, expected a string"),
    ({"rename": 3}, ["a.w"], "CKM516", "rename=3, expected a pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "keys", "code", "text"), REFUSED)
def test_what_is_refused(given: dict[str, Any], keys: list[str], code: str, text: str) -> None:
    with pytest.raises((PlanError, ArgumentError), match=re.escape(text)) as refused:
        Renaming.of(**given).names(keys, "x")
    assert refused.value.code == code
    assert refused.value.hint


def test_a_collision_is_mended_by_its_hint() -> None:
    """The hint's options, used, leave one of the two out."""
    keys = ["s.a", "a", "s.b"]
    with pytest.raises(PlanError, match="would both become 'a'") as refused:
        Renaming.of(strip_prefix="s").names(keys, "x")
    words = shlex.split(refused.value.hint)
    patterns = [word.rstrip(",") for at, word in enumerate(words) if words[at - 1] == "--rename"]
    assert Renaming.of(rename=patterns).names(keys, "x") == {"s.a": "a", "a": "other.a", "s.b": "b"}
    assert "--drop other.a" in refused.value.hint


@pytest.mark.python_texts
def test_the_hint_of_a_collision_in_python() -> None:
    with pytest.raises(PlanError, match="would both become 'a'") as refused:
        Renaming.of(strip_prefix="s").names(["s.a", "a", "s.b"], "x")
    assert "rename='a=other.a', drop='other.a', and rename='s.{x}={x}' in" in refused.value.hint


def test_a_wrapper_in_front_of_a_prefix_is_off_already() -> None:
    with pytest.raises(PlanError, match=r"no name begins with 'module\.net\.'") as refused:
        Renaming.of(strip_prefix="module.net.").names(["net.a", "net.b"], "x")
    assert refused.value.hint == "'module' of DDP is off already: --strip-prefix net"


@pytest.mark.parametrize(
    "record", [None, 3, [], {"rename": "a=b"}, {"strip_prefix": 1, "add_prefix": "", "rename": []}]
)
def test_a_record_that_is_none(record: object) -> None:
    """A manifest may be somebody else's."""
    with pytest.raises(PlanError, match="the manifest's record of new names is malformed"):
        Renaming.recorded(record)


def test_a_pattern_costs_little_whatever_it_is() -> None:
    """Patterns in the manifest of a stranger neither recurse deeply nor are tried in countless ways."""
    many = ".".join(f"{{c{i}}}.a" for i in range(12))
    for rename, key in (
        (f"{many}={many}", ".".join("a" * 64)),
        (".".join(["a"] * 5000) + "=b", "a"),
    ):
        with pytest.raises(PlanError, match=r"matches in many ways|has more than 64 segments"):
            Renaming.recorded({"strip_prefix": "", "add_prefix": "", "rename": [rename]}).names(
                [key], "x"
            )


SEGMENT = st.sampled_from(["a", "b", "0", "w"])
KEYS = st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(".".join), unique=True, min_size=1)
SIDE = st.permutations(["{x}", "{y}", "a", "b"])


@examples(200)
@given(KEYS, st.lists(SEGMENT, min_size=1, max_size=2).map(".".join), st.tuples(SIDE, SIDE))
def test_there_and_back(keys: list[str], prefix: str, sides: tuple[list[str], list[str]]) -> None:
    """A renaming that is accepted loses nothing: each key has one name, and names tell keys apart."""
    old, new = map(".".join, sides)
    ways: list[Callable[[], Renaming]] = [
        lambda: Renaming.of(strip_prefix=prefix),
        lambda: Renaming.of(add_prefix=prefix),
        lambda: Renaming.of(rename=f"{old}={new}"),
    ]
    for way in ways:
        try:
            names = way().names(keys, "x")
        except CkptmapError as error:
            assert error.code in ("CKM618", "CKM114")
            continue
        assert list(names) == keys
        assert len(set(names.values())) == len(keys)
    added = Renaming.of(add_prefix=prefix).names(keys, "x")
    assert Renaming.of(strip_prefix=prefix).names(list(added.values()), "x") == {
        name: key for key, name in added.items()
    }


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("a.*=b.*", "a.{x}=b.{x}"),
        ("a.*.w.*=*.b.*", "a.{x}.w.{y}={x}.b.{y}"),
        ("a=b.c", "a.{x}=b.c.{x}"),
        ("a.l.0=c", "a.l.0.{x}=c.{x}"),
    ],
)
def test_a_glob_and_a_module_are_answered_with_the_pattern_that_is_meant(
    typed: str, meant: str
) -> None:
    keys = ["a.l.0.w.k", "a.l.1.w.k", "z"]
    with pytest.raises(PlanError, match=re.escape(f"--rename {typed!r}")) as raised:
        Renaming.of(rename=typed).names(keys, "m.pt")
    assert f"--rename '{meant}'" in raised.value.hint
    Renaming.of(rename=meant).names(keys, "m.pt")


@pytest.mark.python_texts
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"rename": "b.{x}=c.{x}"}, "rename='b.{x}=c.{x}'"),
        ({"rename": {"b": "c"}}, "rename='b=c'"),
        ({"rename": "b"}, "rename='b'"),
        ({"strip_prefix": "b"}, "strip_prefix='b'"),
        ({"add_prefix": "a..b"}, "add_prefix='a..b'"),
        ({"rename": "a.*=b.*"}, "did you mean rename='a.{x}=b.{x}'"),
    ],
)
def test_python_is_answered_in_python(
    given: dict[str, Any], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every call of the library; the command line is answered with its options."""
    path = tmp_path / "m.pt"
    torch.save({"a.w": torch.ones(2)}, path)
    calls: list[Callable[[], object]] = [
        lambda: ckptmap.open(path, **given),
        lambda: ckptmap.convert(path, tmp_path / "out.pt", to="full", **given),
        lambda: ckptmap.load(path, torch.nn.Linear(1, 2), **given),
    ]
    for call in calls:
        with pytest.raises(CkptmapError) as raised:
            call()
        assert shown in str(raised.value) and "--" not in str(raised.value)
    if isinstance(given.get("rename", ""), str):
        typed = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        assert main(["convert", str(path), str(tmp_path / "out.pt"), "--to", "full", *typed]) == 2
        assert f"--{typed[0][2:].partition('=')[0]} '" in capsys.readouterr().err
