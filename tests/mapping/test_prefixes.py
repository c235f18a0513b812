"""The prefix that keeps names from matching is found, and told as options and arguments."""

from __future__ import annotations

import pytest

from ckptmap.mapping.detect import known_below
from ckptmap.mapping.prefixes import nearest_change

PLAIN = ["embed.w", *(f"layers.{i}.{n}" for i in range(3) for n in ("attn.w", "mlp.w")), "head.w"]


def below(prefix: str, names: list[str] = PLAIN) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


CHANGES: dict[str, tuple[list[str], list[str], str]] = {
    "strip": (below("student"), PLAIN, "strip_prefix='student'"),
    "strip two segments": (below("a.b"), PLAIN, "strip_prefix='a.b'"),
    "of two, the first": (
        [*below("student"), *below("teacher"), "loss.center"], PLAIN,
        "strip_prefix='student', drop=['teacher.*', 'loss.*']",
    ),
    "an EMA": (["n_averaged", *below("module")], PLAIN, "strip_prefix='module', drop=['n_averaged']"),
    "into an EMA": (PLAIN, ["n_averaged", *below("module")], "add_prefix='module'"),
    "add": (PLAIN, below("net"), "add_prefix='net'"),
    "one for another": (below("model.lm"), below("net"), "rename='model.lm.{x}=net.{x}'"),
    "inside": (
        [*below("model.lm"), "lm_head.w"], [*below("model"), "lm_head.w"],
        "rename='model.lm.{x}=model.{x}'",
    ),
    "a head of another size of model": (
        below("net", [*PLAIN, "aux.w"]), [*PLAIN, "cls.w"], "strip_prefix='net', drop=['aux.*']",
    ),
    "a head that is kept below": (
        [*below("s"), "head.old"], PLAIN, "strip_prefix='s', drop=['head.old']"
    ),
    "names with quotes": (below("it's"), PLAIN, 'strip_prefix="it\'s"'),
    "globs in names": ([*below("s"), "x[0].w"], PLAIN, "strip_prefix='s', drop=['x[[]0].*']"),
    "one tensor": (["a.weight"], ["weight"], "strip_prefix='a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_nearest_change(name: str) -> None:
    have, wanted, arguments = CHANGES[name]
    change = nearest_change(have, wanted)
    assert change is not None
    assert change.arguments == arguments
    names = set(change.renaming.names(have, "x").values())
    assert change.matched == len(names & set(wanted))


NONE = {
    "equal": (PLAIN, PLAIN),
    "others": (PLAIN, ["conv.0.weight", "conv.1.weight"]),
    "more of the same": ([*PLAIN, "x.y"], PLAIN),
    "fewer": (PLAIN[:3], PLAIN),
    "a prefix that cannot be typed": (below("a b\n"), PLAIN),
    "a prefix that is a pattern": (below("{x}"), PLAIN),
    "it would make two one": ([*below("s", PLAIN[:1]), *PLAIN[:1], "y.z"], [*PLAIN[:1], "z.y"]),
    "empty": ([], PLAIN),
}


@pytest.mark.parametrize("name", NONE)
def test_no_change_is_told_where_none_mends(name: str) -> None:
    assert nearest_change(*NONE[name]) is None


LLAMA = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"] + [
    f"model.layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
        "post_attention_layernorm",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (below("student", LLAMA), "--strip-prefix student"),
        (["n_averaged", *below("module", LLAMA)], "--strip-prefix module --drop n_averaged"),
        (["n_averaged", *below("module")], "--strip-prefix module --drop n_averaged"),
        ([*below("actor", LLAMA), "critic.w"], "--strip-prefix actor --drop 'critic.*'"),
        (below("a.b.c", LLAMA), "--strip-prefix a.b.c"),
        (PLAIN, None),
        (["n_averaged"], None),
        ([*below("language_model", LLAMA), *below("vision_tower")], None),
    ],
)
def test_names_that_are_known_below_a_prefix(keys: list[str], options: str | None) -> None:
    change = known_below(keys)
    assert (None if change is None else change.options) == options
