"""The rules of mapping files: what they can express, and what is proven when a file is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptmap
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.errors import PlanError
from ckptmap.mapping import value_ops
from ckptmap.mapping.derived_tensor import DerivedTensor
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Unknown, parse_expr
from ckptmap.mapping.mapping_file import load_scheme, parse_scheme
from ckptmap.mapping.name_patterns import parse_names, skeleton
from ckptmap.mapping.resolve import MappedTensor
from ckptmap.mapping.rules import NamingScheme
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.mapping.translate_state_dict import applied
from ckptmap.storage.lazy_tensor import info_of
from ckptmap.tensors import Box

State = dict[str, torch.Tensor]


def scheme(rules: str, dims: str = "", head: str = "") -> NamingScheme:
    """A file with these rules."""
    return parse_scheme(
        f'schema = 1\nfamily = "f"\nscheme = "x"\n{head}\n[dims]\n{dims}\n{rules}', "x.toml"
    )


def rule(hub: str, other: str, more: str = "") -> str:
    return f"[[rule]]\nhf = {hub}\nx = {other}\n{more}\n"


def mapped(
    found: NamingScheme, state: State, config: Mapping[str, Any] | None = None, back: bool = False,
    complete: bool = True,
) -> State:  # fmt: skip
    infos = {key: info_of(tensor) for key, tensor in state.items()}
    ways = (found, None) if back else (None, found)
    return applied(translate(infos, *ways, config, complete=complete), state)


def there_and_back(
    found: NamingScheme, state: State, config: Mapping[str, Any] | None = None
) -> State:
    """What the scheme has, once it was shown that the way back is the identity."""
    made = mapped(found, state, config)
    back = mapped(found, made, config, back=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    return made


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


# --------------------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("7 // 2", 3), ("7 % 4", 3), ("-2 + 3", 1),
        ("hidden / heads", 5), ("missing ?? hidden", 40), ("none ?? 3", 3), ("heads ?? 3", 8),
        ("rope.factor * 8", 4), ("depth", 3), ("a == 'llama'", True), ("a != 'llama'", False),
        ("heads > 4 and not flag", True), ("flag or heads == 8", True), ("missing == null", True),
        ("2 * x", 14), ("x - 1", 6), ("0.1 * 30", 3),
    ],
)  # fmt: skip
def test_expressions(text: str, value: object) -> None:
    config = {
        "hidden": 40, "heads": 8, "none": None, "a": "llama", "flag": False,
        "rope": {"factor": 0.5}, "text_config": {"depth": 3},
    }  # fmt: skip
    dims = Dims({"x": parse_expr("heads - 1")}, config)
    found = parse_expr(text).evaluate(lambda name: dims._value(name, {}))
    assert found == value and isinstance(found, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1 2", "import os", "__import__('os')", "a[0]", "f(x)", "x = 1", "'a", "a.b()",
     "1 if x else 2", "lambda: 1", "(" * 60 + "1" + ")" * 60, "a" * 1001],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(PlanError, match="expression") as caught:
        parse_expr(text)
    assert caught.value.code == "CKM601"


def test_values_that_are_needed_are_named() -> None:
    dims = Dims({"d": parse_expr("head_dim ?? hidden_size / heads")}, None)
    with pytest.raises(Unknown, match="head_dim"):
        dims.number(parse_expr("d + 1"))
    with pytest.raises(Unknown, match="hidden_size"):
        Dims({}, {"heads": 2}).number(parse_expr("hidden_size / heads"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("heads / 3", r"expected a whole number, found 8/3 \(heads = 8\)"), ("0 - heads", "found -8"),
     ("name * 2", "expected a number, found 'llama'"), ("heads / zero", "heads / zero': division by zero")],
)  # fmt: skip
def test_sizes_that_do_not_work_out(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Dims({}, {"heads": 8, "name": "llama", "zero": 0}).number(parse_expr(text))
    assert caught.value.code == "CKM614"


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50))
def test_arithmetic_is_exact(a: int, b: int, c: int) -> None:
    found = parse_expr("(a + c) / b * b - c").evaluate(
        lambda name: Fraction({"a": a, "b": b, "c": c}[name])
    )
    assert found == a


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("key", "shape", "found"),
    [("layers.12.w1.weight", "layers.{}.w1.weight", (12,)), ("h.0.mlp.3.c", "h.{}.mlp.{}.c", (0, 3)),
     ("a.01.b", "a.01.b", ()), ("7", "{}", (7,)), ("w", "w", ()), ("3.4", "{}.{}", (3, 4)),
     ("a.-1.b", "a.-1.b", ()), ("layer12.w", "layer12.w", ())],
)  # fmt: skip
def test_skeletons(key: str, shape: str, found: tuple[int, ...]) -> None:
    """Only a whole segment is a number, and only if it is written as numbers are."""
    assert skeleton(key) == (shape, found)


@pytest.mark.parametrize("text", ["", "a b", "a.{n", "a.x{n}.b", "a.{n}.{n}", "a.{}.b", "a |"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(PlanError, match="rule 1: ") as caught:
        parse_names(text, "rule 1")
    assert caught.value.code == "CKM601"


# --------------------------------------------------------------------------- what rules can say


def test_rotary_halves_and_neighbours() -> None:
    found = scheme(rule('"q :: (h two r) i"', '"w :: (h r two) i"'), 'r = "half"')
    made = there_and_back(found, {"q": numbers(12, 5)}, {"half": 3})
    assert torch.equal(made["w"], numbers(2, 2, 3, 5).transpose(1, 2).reshape(12, 5))


def test_partial_rotary_by_segments() -> None:
    """Of each head of 7, the first 4 are rotated."""
    found = scheme(
        rule('"q :: (h [two r | p]) i"', '"w :: (h [r two | p]) i"'), 'r = "rot / 2"\np = "d - rot"'
    )
    made = there_and_back(found, {"q": numbers(21, 2)}, {"rot": 4, "d": 7})
    heads = numbers(3, 7, 2)
    turned = heads[:, :4].reshape(3, 2, 2, 2).transpose(1, 2).reshape(3, 4, 2)
    assert torch.equal(made["w"], torch.cat([turned, heads[:, 4:]], 1).reshape(21, 2))
    whole = there_and_back(found, {"q": numbers(8, 2)}, {"rot": 4, "d": 4})  # an empty segment
    assert torch.equal(whole["w"], numbers(2, 2, 2, 2).transpose(1, 2).reshape(8, 2))


def test_blocks_against_groups_by_segments_that_share_an_axis() -> None:
    """Phi-3's q, k and v, a block each, against Megatron's: a group's queries, its k, its v."""
    found = scheme(
        rule('"a :: ([g q | g | g] d) i"', '"b :: (g [q | 1 | 1] d) i"'),
        'g = "groups"\nq = "queries"\nd = "head"',
    )
    config = {"groups": 2, "queries": 3, "head": 5}
    made = there_and_back(found, {"a": numbers(50, 2)}, config)
    q, k, v = (part.view(2, -1, 2) for part in torch.split(numbers(50, 2), [30, 10, 10]))
    assert torch.equal(made["b"], torch.cat([q, k, v], 1).view(50, 2))
    with pytest.raises(PlanError, match=r"a: expected \[50, .*found \[45, 2\]") as caught:
        mapped(found, {"a": numbers(45, 2)}, config)
    assert caught.value.code == "CKM606"


def test_grouped_heads_of_one_matrix() -> None:
    """Megatron's and Falcon's: for each group its queries, then its k, then its v."""
    found = scheme(
        rule('["q :: (g s d) i @ s[0:q]", "k :: (g d) i @ s[q]", "v :: (g d) i @ s[q+1]"]',
             '"qkv :: (g s d) i"'),
        'g = "kv"\nd = "size"\nq = "heads / kv"\ns = "q + 2"',
    )  # fmt: skip
    config = {"kv": 2, "heads": 6, "size": 4}
    q, k, v = numbers(24, 3), numbers(8, 3) + 100, numbers(8, 3) + 200
    made = there_and_back(found, {"q": q, "k": k, "v": v}, config)
    expected = torch.cat([q.view(2, 3, 4, 3), k.view(2, 1, 4, 3), v.view(2, 1, 4, 3)], 1)
    assert torch.equal(made["qkv"], expected.reshape(40, 3))


def test_two_matrices_to_two_others() -> None:
    """Cut at 3 on one side and at 5 on the other, with rows that meet in between."""
    found = scheme(
        rule(
            '["a :: s i @ s[0:3]", "b :: s i @ s[3:9]"]',
            '["c :: s i @ s[0:5]", "d :: s i @ s[5:9]"]',
        )
    )
    made = there_and_back(found, {"a": numbers(3, 2), "b": numbers(6, 2) + 10})
    whole = torch.cat([numbers(3, 2), numbers(6, 2) + 10])
    assert torch.equal(made["c"], whole[:5]) and torch.equal(made["d"], whole[5:])


def test_stacked_transposed_and_interleaved_experts() -> None:
    found = scheme(
        rule('["e.{e}.gate :: m i @ two[0]", "e.{e}.up :: m i @ two[1]"]', '"fused :: e i (m two)"')
    )
    state = {f"e.{e}.{name}": numbers(3, 2) + 10 * e + 100 * (name == "up")
             for e in range(4) for name in ("gate", "up")}  # fmt: skip
    made = there_and_back(found, state)
    assert made["fused"].shape == (4, 2, 6)
    for e in range(4):
        assert torch.equal(made["fused"][e, :, 0::2], state[f"e.{e}.gate"].t())
        assert torch.equal(made["fused"][e, :, 1::2], state[f"e.{e}.up"].t())


def test_layers_behind_the_last_one() -> None:
    """Next-token layers, numbered on in one scheme and from 0 in the other."""
    found = scheme(
        rule('"layers.{n}.w"', '"layers.{n}.w"', 'range = { n = "0 : n" }')
        + rule('"layers.{k+n}.w"', '"mtp.{k}.w"'),
        'n = "depth"\nk = "next"',
    )
    state = {f"layers.{i}.w": numbers(2) + i for i in range(5)}
    made = there_and_back(found, state, {"depth": 3, "next": 2})
    assert list(made) == ["layers.0.w", "layers.1.w", "layers.2.w", "mtp.0.w", "mtp.1.w"]
    assert torch.equal(made["mtp.1.w"], numbers(2) + 4)


def test_alternatives_are_read_in_any_and_written_in_the_first() -> None:
    found = scheme(rule('"norm"', '"te.norm | local.norm"'))
    for name in ("te.norm", "local.norm"):
        assert mapped(found, {name: numbers(2)}, back=True).keys() == {"norm"}
    assert mapped(found, {"norm": numbers(2)}).keys() == {"te.norm"}
    with pytest.raises(PlanError, match=r"would be made twice") as caught:
        mapped(found, {"te.norm": numbers(2), "local.norm": numbers(2)}, back=True)
    assert caught.value.code == "CKM608"


def test_when_and_optional() -> None:
    found = scheme(
        rule('"a"', '"x.a"')
        + rule('"bias"', '"x.bias"', 'when = "has_bias"')
        + rule('"more"', '"x.more"', "optional = true")
    )
    assert mapped(found, {"a": numbers(1)}, {"has_bias": False}).keys() == {"x.a"}
    both = {"a": numbers(1), "bias": numbers(1), "more": numbers(1)}
    assert mapped(found, both, {"has_bias": True}).keys() == {"x.a", "x.bias", "x.more"}
    assert mapped(found, both, None).keys() == {"x.a", "x.bias", "x.more"}  # nobody knows
    with pytest.raises(PlanError, match=r"bias is missing.*has_bias True"):
        mapped(found, {"a": numbers(1)}, {"has_bias": True})


def test_padding_is_zeros_and_comes_off_again() -> None:
    found = scheme(rule('"e :: v i"', '"w :: v i"', "pad = { v = 8 }"), 'v = "vocab"')
    made = there_and_back(found, {"e": numbers(13, 3) + 1}, {"vocab": 13})
    assert made["w"].shape == (16, 3) and not made["w"][13:].any()
    assert torch.equal(made["w"][:13], numbers(13, 3) + 1)
    with pytest.raises(PlanError, match="needs vocab") as caught:
        mapped(found, made, None, back=True)
    assert caught.value.code == "CKM605"


def test_value_ops_and_their_inverses() -> None:
    found = scheme(
        rule('"a"', '"x.a"', 'op = "add 1"') + rule('"b"', '"x.b"', 'op = "neg"')
        + rule('"c"', '"x.c"', 'op = "cast bfloat16"')
    )  # fmt: skip
    state = {key: torch.linspace(-1, 1, 9) for key in "abc"}
    made = mapped(found, state)
    assert torch.equal(made["x.a"], (state["a"].double() + 1).float())
    assert torch.equal(made["x.b"], -state["b"])
    assert torch.equal(made["x.c"], state["c"].bfloat16())
    back = mapped(found, made, back=True)
    assert torch.equal(back["b"], state["b"]) and back["c"].dtype == torch.bfloat16
    assert torch.equal(back["a"], (made["x.a"].double() - 1).float())
    with pytest.raises(PlanError, match="expected floating values, found int64") as caught:
        mapped(found, {key: numbers(3) for key in "abc"})
    assert caught.value.code == "CKM613"


def test_sizes_from_shapes_alone() -> None:
    """One unknown a dim needs no config; two do, and the message says which values."""
    found = scheme(
        rule('"q :: (h two r) i"', '"w :: (h r two) i"'), 'r = "head_dim / 2"\nh = "heads"'
    )
    with pytest.raises(PlanError, match="needs heads, head_dim") as caught:
        mapped(found, {"q": numbers(12, 5)})
    assert caught.value.code == "CKM605"
    assert "[12, 5] of q" in str(caught.value)
    assert mapped(found, {"q": numbers(12, 5)}, {"head_dim": 6})["w"].shape == (12, 5)


def test_a_tie_is_made_or_left_out() -> None:
    rules = rule('"embed"', '"tok"') + rule('"head"', '"out"')
    tie = '[[tie]]\nwhen = "tied"\nhf = ["head", "embed"]\n'
    state, config = {"embed": numbers(3)}, {"tied": True}
    made = mapped(scheme(rules + tie), state, config)
    assert torch.equal(made["out"], made["tok"])
    both = scheme(rules + tie + 'x = ["out", "tok"]\n')
    assert mapped(both, state, config).keys() == {"tok"}
    assert mapped(both, {**state, "head": numbers(3)}, config).keys() == {"tok"}
    with pytest.raises(PlanError, match="out is tied to tok, and their values differ") as caught:
        mapped(both, {**state, "head": numbers(3) + 1}, config)
    assert caught.value.code == "CKM208"
    with pytest.raises(PlanError, match="head is missing and may be tied: needs tied"):
        mapped(scheme(rules + tie), state, None)


def test_a_tie_that_is_written_all_the_same() -> None:
    """nanoGPT's state dict has both; a writer that stores a storage once leaves one out."""
    rules = rule('"embed"', '"tok"') + rule('"head"', '"out"')
    tie = '[[tie]]\nwhen = "tied"\nhf = ["head", "embed"]\nx = ["out", "tok"]\nwritten = true\n'
    found, state, config = scheme(rules + tie), {"embed": numbers(3)}, {"tied": True}
    made = mapped(found, state, config)
    assert torch.equal(made["out"], made["tok"])
    own = mapped(found, {**state, "head": numbers(3) + 1}, config)
    assert torch.equal(own["out"], numbers(3) + 1)
    assert mapped(found, {"tok": numbers(3)}, config, back=True).keys() == {"embed"}
    with pytest.raises(PlanError, match="out is missing"):
        mapped(found, {"tok": numbers(3)}, {"tied": False}, back=True)


def test_what_a_file_refuses_itself() -> None:
    found = scheme(
        rule('"a"', '"b"') + '[[refuse]]\nwhen = "act == \'relu2\'"\nwhy = "no place for it"\n'
    )
    with pytest.raises(PlanError, match="f/x: no place for it") as caught:
        mapped(found, {"a": numbers(1)}, {"act": "relu2"})
    assert caught.value.code == "CKM617"
    assert mapped(found, {"a": numbers(1)}, {"act": "silu"}).keys() == {"b"}


@given(st.data())
def test_any_order_of_axes_comes_back(data: st.DataObject) -> None:
    """Random axes on both sides, cut into dims at random: a bijection, forward and back."""
    axes = data.draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in axes}
    sides = []
    for _ in range(2):
        order = data.draw(st.permutations(axes))
        cut = data.draw(st.integers(0, len(order)))
        sides.append([list(order[:cut]), list(order[cut:])])
    hub, other = (" ".join(f"({' '.join(dim) or '1'})" for dim in side) for side in sides)
    dims = "\n".join(f"{axis} = {n}" for axis, n in sizes.items())
    found = scheme(rule(f'"w :: {hub}"', f'"v :: {other}"'), dims)
    shape = [torch.Size([sizes[a] for a in dim]).numel() for dim in sides[0]]
    made = there_and_back(found, {"w": numbers(*shape)})
    flat = [axis for dim in sides[0] for axis in dim]
    order = [flat.index(axis) for dim in sides[1] for axis in dim]
    expected = numbers(*[sizes[a] for a in flat]).permute(order).reshape(made["v"].shape)
    assert torch.equal(made["v"], expected)


# --------------------------------------------------------------------------- proofs at load time


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (rule('"a :: h i"', '"b :: h j"'), "axis '[ij]' is not an axis of"),
        (rule('"a :: (h two r) i"', '"b :: (h r) i"'), "axis 'two' is not an axis of b"),
        (rule('["a", "b"]', '"c :: s i"'), "axes are missing"),
        (rule('["a :: s i @ s[0:3]", "b :: s i @ s[2:6]"]', '"c :: s i"'), "chunks .* overlap"),
        (rule('["a :: s i @ s[0:3]", "b :: s i @ s[4:6]"]', '"c :: s i"'), "cover .* of .* elements"),
        (rule('"e.{e}.w :: m i"', '"w :: m i"'), "axis 'e' is not an axis of w"),
        (rule('"e.{e}.w :: e i"', '"w :: e i"'), "'e' is both a capture and an axis"),
        (rule('"a :: i @ two[0]"', '"b :: two i"'), "cover"),
        (rule('"a :: two i @ two[0]"', '"b :: two i"'), "slice is in its pattern"),
        (rule('["a :: i @ s[0:1]", "b :: i @ s[1:2]"]', '"c :: s i"'), "slice is not in its pattern"),
        (rule('"a :: [x | y]"', '"b :: [x | y | z]"'), "the same number of segments"),
        (rule('"a.{n}"', '"x.{n}"') + rule('"a.{n}"', '"y.{n}"'), "rule 1 .* and rule 2 .* both match the key"),
        (rule('"a.{n}"', '"x.{n}"') + rule('"a.3"', '"y"'), "both match the key"),
        (rule('"a"', '"x"') + rule('"b"', '"x"'), "both match the key x"),
        (rule('"a"', '"x"') + '[[drop]]\nhf = "a"\nwhy = "no"\n', "both match the key a"),
        (rule('"a"', '"b"', 'range = { n = "0 : 3" }'), "range of 'n'"),
        (rule('"a :: v i"', '"b :: (v i)"', "pad = { v = 8 }"), "'v' is not alone in a dim"),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves(rules: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        scheme(rules)
    assert caught.value.code == "CKM602"
    assert "x.toml" in str(caught.value) or "f/x" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (rule('"a"', '"b"', 'wen = "x"'), "has 'wen', expected one of"),
        ('[[rule]]\nhf = "a"\n', "has no side 'x'"),
        (rule('"a :: (h i"', '"b :: h i"'), r"'\(' is not closed"),
        (rule('"a :: h h"', '"b :: h h"'), "axis 'h' occurs twice"),
        (rule('"a :: [h h | i]"', '"b :: [h | i]"'), "axis 'h' occurs twice"),
        (rule('"a :: h [h | i]"', '"b :: h [i | i]"'), "axis 'h' occurs twice"),
        (rule('"a :: [ | i]"', '"b :: [i | i]"'), "a segment names no axis"),
        (rule('"a :: "', '"b"'), "is empty"),
        (rule('"a :: h ! i"', '"b"'), "cannot be read at"),
        (rule('"a :: [x]"', '"b :: [x]"'), "two or more segments"),
        (rule('"a :: h i @ s"', '"b"'), "is not a slice"),
        (rule('"a :: h i"', "3"), "expected a list of texts|expected text"),
        (rule("[]", '"b"'), "is empty"),
        (rule('"a"', '"b"', "optional = 3"), "expected true or"),
        (rule('"a"', '"b"', 'range = { n = "3" }'), 'expected "LOW : END"'),
        (rule('"a"', '"b"', 'range = { n = "0 : n +" }'), r"x\.toml: .*'n \+': ends too early"),
        (rule('"a"', '"b"') + '[[drop]]\nhf = "c"\n', "needs names of one side, and a why"),
        (rule('"a"', '"b"') + '[[tie]]\nhf = ["c"]\n', "needs two names"),
        (rule('"a"', '"b"') + '[[tie]]\nx = ["c", "b"]\nwritten = 1\n', "written is 1, expected"),
        (rule('"a"', '"b"') + '[[refuse]]\nwhy = "x"\n', "needs a when"),
        ("", r"has no \[\[rule\]\]"),
        ("[[rule]]\nhf = ", "is not valid TOML"),
        (rule('"a"', '"b"') + '[[rule]]\nhf="c"\nhf="d"\nx="e"\n', "is not valid TOML"),
    ],
)  # fmt: skip
def test_files_that_are_malformed(rules: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        scheme(rules)
    assert caught.value.code == "CKM601"


def test_other_things_that_a_file_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="schema 2, expected 1"):
        parse_scheme('schema = 2\nfamily = "f"\nscheme = "x"\n', "x.toml")
    with pytest.raises(PlanError, match="a -> b -> a is circular") as caught:
        scheme(rule('"a"', '"b"'), 'a = "b + 1"\nb = "a + 1"')
    assert caught.value.code == "CKM602"
    with pytest.raises(PlanError, match="cannot be read") as caught:
        load_scheme(tmp_path / "none.toml")
    assert caught.value.code == "CKM603"
    (tmp_path / "large.toml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(PlanError, match="expected at most") as caught:
        load_scheme(tmp_path / "large.toml")
    assert caught.value.code == "CKM601"


def test_a_file_or_config_cannot_keep_us_busy() -> None:
    """A billion experts, layers that nobody has: refused at once, nothing is counted through."""
    stack = rule('"e.{e}.w :: m i"', '"w :: e m i"')
    with pytest.raises(PlanError, match="1000000000 tensors of 'e', expected at most") as caught:
        scheme(stack, "e = 1000000000")
    assert caught.value.code == "CKM614"
    found = scheme(stack, 'e = "experts"')
    with pytest.raises(PlanError, match="tensors of 'e', expected at most"):
        mapped(found, {"w": numbers(2, 3, 4)}, {"experts": 10**12}, back=True)
    layers = scheme(rule('"l.{n}.w"', '"x.{n}.w"'), 'n = "layers"')
    with pytest.raises(PlanError, match=r"l\.1\.w is missing, found 1 of 1000000000000"):
        mapped(layers, {"l.0.w": numbers(2)}, {"layers": 10**12})


def test_norms_of_one_more_in_float32_come_back_bit_for_bit() -> None:
    """Every bfloat16 of 0 and of 2^-16 to 2^16: its sum with 1 is a float32. In bfloat16 it is rounded."""
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
    size = every.double().abs()
    norms = every[((size >= 2**-16) & (size <= 2**16)) | (every.view(torch.int16) == 0)]
    assert len(norms) == 2 * (32 * 128 + 1) + 1

    def there_and_back(text: str) -> torch.Tensor:
        op = value_ops.parse_value_op(text)
        return op.apply(op.apply(norms, False), True)

    wide = there_and_back("add 1 float32")
    assert wide.dtype == torch.float32 and torch.equal(wide, norms.float())
    assert torch.equal(wide.bfloat16().view(torch.int16), norms.view(torch.int16))
    assert not torch.equal(there_and_back("add 1"), norms)


@pytest.mark.parametrize("op", ["os:system", "add", "add x", "cast int8", "exp", "torch.exp"])
def test_a_file_can_name_no_code(op: str) -> None:
    """An op of one's own is an entry point of an installed package, never an import by a file."""
    with pytest.raises(PlanError, match="no installed package has it") as caught:
        scheme(rule('"a"', '"b"', f'op = "{op}"'))
    assert caught.value.code == "CKM613"


class Halved:
    """A value op as a package would bring it."""

    @staticmethod
    def forward(values: torch.Tensor) -> torch.Tensor:
        return values / 2

    @staticmethod
    def inverse(values: torch.Tensor) -> torch.Tensor:
        return values * 2


def test_an_installed_op_brings_its_inverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        name, value = "halved", "somewhere:Halved"
        loaded: object = Halved

        def load(self) -> object:
            return self.loaded

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()])
    value_ops.parse_value_op.cache_clear()
    found = scheme(rule('"a"', '"b"', 'op = "halved"'))
    made = mapped(found, {"a": torch.tensor([2.0])})
    assert made["b"].item() == 1.0
    assert mapped(found, made, back=True)["a"].item() == 2.0
    save_file({"a": torch.tensor([2.0])}, tmp_path / "a.safetensors")
    where = []
    forward = Halved.forward

    @staticmethod
    def noted(values: torch.Tensor) -> torch.Tensor:
        where.append(values.device.type)
        return forward(values)

    monkeypatch.setattr(Halved, "forward", noted)
    with ckptmap.open(tmp_path / "a.safetensors") as opened:
        one = MappedTensor("b", opened["a"].info, "a", ops=(("halved", False),))
        derived = DerivedTensor(one, {"a": opened["a"]}, DENSE)
        derived.read_into(Box.whole((1,)), torch.empty(1, device="meta"))
    assert where == ["cpu"], "a GPU may round it otherwise"
    value_ops.parse_value_op.cache_clear()
    monkeypatch.setattr(Entry, "loaded", len)
    with pytest.raises(PlanError, match="has no forward and inverse") as caught:
        scheme(rule('"a"', '"b"', 'op = "halved"'))
    assert caught.value.code == "CKM613"
    value_ops.parse_value_op.cache_clear()
