"""A model that was saved inside another module converts to what it would be, had it been saved alone.

Each writer saves its model below a prefix, or alone: after --strip-prefix the two are equal in names,
values, optimizer state and all else, in every setup.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.swa_utils import AveragedModel

import ckptmap
from ckptmap.errors import CkptmapError, LoadError, PlanError
from ckptmap.planning.saved_plan import replan
from tests.corpus.models import Recipe, optimizer_for, tiny, tiny_llama, train
from tests.support.merge_cases import llama, saved
from tests.support.paths import GOLDEN
from tests.support.quantized_models import WRITERS as QUANTIZED

Write = Callable[[Path, bool], None]
RECIPE = Recipe(hidden=16, ffn=24, layers=2, tied=True)


def _module(model: nn.Module, inside: bool) -> nn.Module:
    return nn.ModuleDict({"net": model}) if inside else model


def training_script(path: Path, inside: bool) -> None:
    """Optimizer state by index, tied weights, buffers of three dtypes."""
    model = tiny(RECIPE)
    optimizer = optimizer_for(model)
    train(model, optimizer)
    state = {"state_dict": _module(model, inside).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epoch": 3}, path)


def compiled_under_ddp(path: Path, inside: bool) -> None:
    """A model that is compiled in a module that DDP wraps: module.net._orig_mod.X."""
    outer = _module(torch.compile(tiny(RECIPE), backend="eager"), inside)  # type: ignore[arg-type]
    torch.save({f"module.{key}": value for key, value in outer.state_dict().items()}, path)


def dcp_by_name(path: Path, inside: bool) -> None:
    """Optimizer state by FQN, in torch.distributed.checkpoint's directory."""
    model = tiny(RECIPE)
    outer = _module(model, inside)
    optimizer = optimizer_for(model)
    train(model, optimizer)
    state = {"model": outer.state_dict(), "optimizer": get_optimizer_state_dict(outer, optimizer)}
    save(state, checkpoint_id=path)


class Counting(nn.Linear):
    """A layer with extra state: a dict with a tensor in it."""

    def get_extra_state(self) -> Any:
        return {"steps": 3, "seen": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        assert state["steps"] == 3


def extra_state(path: Path, inside: bool) -> None:
    model = nn.Sequential(Counting(4, 4), nn.Linear(4, 2))
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    torch.save(_module(model, inside).state_dict(), path)


WRITERS: dict[str, Write] = {
    writer.__name__: writer
    for writer in (training_script, compiled_under_ddp, dcp_by_name, extra_state)
}
SETUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "ddp": {},
    "fsdp2": {"world_size": 2},
    "fsdp2-ranks": {"world_size": 2},
    "hf": {"optimizer": "drop"},
    "full-nf4": {"optimizer": "drop"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    folder, made = tmp_path_factory.mktemp("renamed"), set[Path]()

    def write(name: str, inside: bool) -> Path:
        path = folder / f"{name}-{inside}"
        if path not in made:
            WRITERS[name](path, inside)
            made.add(path)
        return path

    return write


@pytest.mark.parametrize("to", SETUPS)
@pytest.mark.parametrize("name", WRITERS)
def test_as_if_saved_alone(
    name: str, to: str, written: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    inside, alone = written(name, True), written(name, False)
    ways: dict[str, tuple[Path, dict[str, Any]]] = {
        "a": (inside, {"strip_prefix": "net"}), "b": (alone, {})
    }  # fmt: skip
    if to == "full":
        ways["p"] = inside, {"rename": ["net.{x}={x}"]}
    for out, (src, names) in ways.items():
        plan = ckptmap.plan(src, to, **SETUPS[to], **names)
        plan.save(tmp_path / f"{out}.json")
        assert replan(tmp_path / f"{out}.json").digest == plan.digest
        with plan.ckpt:
            plan.execute(tmp_path / out)
        report = ckptmap.verify(tmp_path / out, against=src)
        assert report.ok, report
        if out != "b":
            with ckptmap.open(src, **names) as opened:
                assert ckptmap.verify(tmp_path / out, against=opened).ok
    for out in {*ways} - {"b"}:
        report_of_both = ckptmap.diff(tmp_path / out, tmp_path / "b", values=True)
        assert report_of_both.equal, report_of_both
    if to in ("full", "ddp"):
        one, other = (torch.load(tmp_path / out, weights_only=False) for out in "ab")
        assert _keys(one) == _keys(other)


def _keys(tree: Any) -> Any:
    return {key: _keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None


@pytest.mark.parametrize("name", WRITERS)
def test_there_and_back(name: str, written: Callable[[str, bool], Path], tmp_path: Path) -> None:
    """A prefix that is added is that of the writer itself; `load` and `diff` take the same names."""
    inside, alone = written(name, True), written(name, False)
    ckptmap.convert(alone, tmp_path / "out.pt", "full", add_prefix="net")
    back = ckptmap.diff(tmp_path / "out.pt", inside, values=True)
    assert not (back.only_a or back.only_b or back.changed), back
    assert ckptmap.verify(tmp_path / "out.pt", against=alone).ok
    apart = ckptmap.diff(inside, alone)
    assert apart.only_a and apart.only_b
    assert apart.mended_by == f"ckptmap diff {inside} {alone} --strip-prefix net"
    joined = ckptmap.diff(inside, alone, strip_prefix="net", values=True)
    assert joined.equal, joined


@pytest.mark.parametrize("name", QUANTIZED)
def test_parts_of_a_quantized_weight_follow_its_name(name: str, tmp_path: Path) -> None:
    src = tmp_path / "model"
    QUANTIZED[name](src)
    ckptmap.convert(src, tmp_path / "out.pt", "full", add_prefix="student")
    assert ckptmap.verify(tmp_path / "out.pt", against=src).ok
    with ckptmap.open(tmp_path / "out.pt") as out, ckptmap.open(src) as ckpt:
        assert list(out) == [f"student.{fqn}" for fqn in ckpt]
        assert out.encodings == ckpt.encodings
    ckptmap.convert(tmp_path / "out.pt", tmp_path / "back.pt", "full", strip_prefix="student")
    assert ckptmap.diff(tmp_path / "back.pt", src, values=True).equal


def test_a_real_lightning_checkpoint(tmp_path: Path) -> None:
    """Lightning puts the attribute of the module before every name, in the optimizer's state too."""
    src = GOLDEN / "lightning/trainer/trainer.ckpt"
    drop = ["hyper_parameters.net", "hyper_parameters.optimizer", "hyper_parameters.loss"]
    ckptmap.convert(src, tmp_path / "out", "fsdp2", strip_prefix="net", drop=drop, world_size=2)
    saved = torch.load(src, weights_only=False)
    with ckptmap.open(tmp_path / "out") as ckpt:
        expected = {key.removeprefix("net."): v for key, v in saved["state_dict"].items()}
        assert {key: True for key in ckpt} == {
            key: torch.equal(ckpt[key].read(), value) for key, value in expected.items()
        }
        assert set(ckpt.optimizer) <= set(ckpt) and ckpt.optimizer
    assert ckptmap.verify(tmp_path / "out", against=src).ok


def test_an_average_and_its_counter(tmp_path: Path) -> None:
    """torch's AveragedModel: the model below `module.`, the number of updates beside it."""
    model = tiny_llama()
    average = AveragedModel(model)
    average.update_parameters(model)
    torch.save(average.state_dict(), tmp_path / "ema.pt")
    plan = ckptmap.plan(tmp_path / "ema.pt", "full")
    assert any("add --strip-prefix module --drop n_averaged" in note for note in plan.notes)
    ckptmap.convert(
        tmp_path / "ema.pt", tmp_path / "out.pt", "full", strip_prefix="module", drop="n_averaged"
    )
    assert ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "ema.pt").ok
    model.load_state_dict(torch.load(tmp_path / "out.pt"))
    # and back into an average that goes on
    report = ckptmap.load(tmp_path / "out.pt", average, add_prefix="module", strict=False)
    assert report.missing == ("n_averaged",)


def test_the_names_of_an_index_are_those_before_or_after(tmp_path: Path) -> None:
    """--param-order may name parameters as the file does; of an opened checkpoint also as it is named."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*b.parameters(), *a.parameters()], lr=0.1, momentum=0.9)
    (a(torch.ones(1, 3)) + b(torch.ones(1, 3)) * 2).sum().backward()
    optimizer.step()
    model = {**a.state_dict(prefix="s.a."), **b.state_dict(prefix="s.b.")}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    stored = [["s.b.weight", "s.b.bias", "s.a.weight", "s.a.bias"]]
    short = [[name.removeprefix("s.") for name in stored[0]]]
    momentum = optimizer.state[b.weight]["momentum_buffer"]
    with ckptmap.open(tmp_path / "in.pt", strip_prefix="s") as ckpt:
        orders = [
            ckpt.with_optimizer_order(short),
            ckpt.with_optimizer_order(stored),
            ckptmap.open(tmp_path / "in.pt", strip_prefix="s", param_order=stored),
        ]
        for named in orders:
            assert set(named.optimizer) == set(short[0])
            assert named.optimizer["b.weight"]["momentum_buffer"].read().equal(momentum)
        orders[-1].close()
    plan = ckptmap.plan(tmp_path / "in.pt", "full", strip_prefix="s", param_order=stored)
    with plan.ckpt:
        plan.execute(tmp_path / "out.pt")
    with ckptmap.open(tmp_path / "in.pt", param_order=stored) as ckpt:
        assert ckptmap.verify(tmp_path / "out.pt", against=ckpt).ok


def test_two_renamings_in_turn(tmp_path: Path) -> None:
    """An opened checkpoint that was renamed is renamed again; the manifest has both."""
    torch.save({"s.a.weight": torch.ones(2), "s.b.weight": torch.zeros(2)}, tmp_path / "in.pt")
    with ckptmap.open(tmp_path / "in.pt", strip_prefix="s") as ckpt:
        ckptmap.convert(ckpt, tmp_path / "out.pt", "full", rename="a.{x}=c.{x}", add_prefix="t")
    assert list(torch.load(tmp_path / "out.pt")) == ["t.c.weight", "t.b.weight"]
    assert ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "in.pt").ok


def test_globs_go_by_the_new_names(tmp_path: Path) -> None:
    torch.save(
        {f"{s}.{k}": torch.ones(2) for s in "st" for k in ("a.w", "b.w")}, tmp_path / "in.pt"
    )
    ckptmap.convert(
        tmp_path / "in.pt", tmp_path / "out.pt", "full",
        strip_prefix="s", drop="t.*", exclude="b.*", wrap="ddp",
    )  # fmt: skip
    assert list(torch.load(tmp_path / "out.pt")) == ["module.a.w"]
    assert ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "in.pt").ok


def test_state_of_no_weight_takes_no_name(tmp_path: Path) -> None:
    """Optimizer state of a parameter that is no weight follows the same rules, and is told apart."""
    state = {"s.a": {"step": 1}, "a": {"step": 2}}
    optimizer = {"state": state, "param_groups": [{"params": ["s.a", "a"], "lr": 0.1}]}
    torch.save(
        {"model": {"s.a": torch.ones(2), "b": torch.ones(1)}, "optimizer": optimizer},
        tmp_path / "x",
    )
    with pytest.raises(PlanError, match=r"optimizer state: 's.a' and 'a' would both become 'a'"):
        ckptmap.plan(tmp_path / "x", "full", strip_prefix="s")


def test_names_like_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    for name, prefix in (("plain", ""), ("net", "net."), ("ddp", "module.")):
        torch.save({f"{prefix}{k}.weight": torch.ones(2) for k in "ab"}, tmp_path / name)
    refused = {
        ("net", "plain"): "has none of the 2 names.*add --strip-prefix net: 2 of 2 names match",
        ("plain", "net"): "has none of the 2 names.*add --add-prefix net",
        ("plain", "plain"): "changes nothing, both have plain names",
    }
    for (src, like), text in refused.items():
        with pytest.raises(PlanError, match=text) as error:
            ckptmap.plan(tmp_path / src, "full", names_like=tmp_path / like)
        assert error.value.code == "CKM618"
    for src, like, names in (
        ("plain", "ddp", {}),
        ("ddp", "plain", {}),
        ("net", "ddp", {"strip_prefix": "net"}),
    ):
        ckptmap.plan(tmp_path / src, "full", names_like=tmp_path / like, **names)


@pytest.mark.parametrize("to", ["full", "hf", "fsdp2", "dcp-hf"])
@pytest.mark.parametrize(
    "names",
    [
        {"add_prefix": "optimizer"}, {"add_prefix": "model"}, {"add_prefix": "a/b"}, {"add_prefix": "0"},
        {"rename": "w=extra"}, {"rename": "w=state_dict"}, {"rename": "w=x._extra_state"},
        {"rename": "w=b.absmax"}, {"rename": "w=__metadata__"}, {"add_prefix": "module"},
    ],
    ids=str,
)  # fmt: skip
def test_names_that_mean_something_to_readers(
    names: dict[str, str], to: str, tmp_path: Path
) -> None:
    """They are read back as they were given, or refused before a byte is written."""
    torch.save({"w": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "in.pt")
    with ckptmap.open(tmp_path / "in.pt", **names) as expected:  # type: ignore[arg-type]
        wanted = set(expected)
    try:
        plan = ckptmap.plan(tmp_path / "in.pt", to, **names)  # type: ignore[arg-type]
    except CkptmapError as error:
        assert error.code in {"CKM114", "CKM203"}
        assert (
            "__metadata__" in str(names)
            or "--wrap ddp in place of --add-prefix module" in error.hint
        )
        return
    with plan.ckpt:
        plan.execute(tmp_path / "out")
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert set(ckpt) == wanted
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in.pt").ok


def test_a_prefix_and_another_scheme(tmp_path: Path) -> None:
    """The prefix comes off before the scheme is recognised; `verify` does both again."""
    model = tiny_llama()
    torch.save(_module(model, True).state_dict(), tmp_path / "in.pt")
    model.config.save_pretrained(tmp_path / "base")
    ckptmap.convert(
        tmp_path / "in.pt", tmp_path / "out.pt", "full",
        strip_prefix="net", names="meta", config_from=tmp_path / "base",
    )  # fmt: skip
    with ckptmap.open(tmp_path / "out.pt") as ckpt:
        assert "tok_embeddings.weight" in ckpt
    assert ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "in.pt").ok


def test_a_base_inside_another_module(tmp_path: Path) -> None:
    """peft's adapter goes by the base's own names: the prefix comes off before the merge."""
    wrapped = saved(tmp_path, llama(torch.bfloat16), target_modules=["q_proj"])
    base = {f"net.{key}": value for key, value in llama(torch.bfloat16).state_dict().items()}
    torch.save(base, tmp_path / "net.pt")
    ckptmap.merge(
        tmp_path / "net.pt", tmp_path / "adapter", tmp_path / "out.pt", "full", strip_prefix="net"
    )
    ckptmap.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "twin.pt", "full")
    assert ckptmap.diff(tmp_path / "out.pt", tmp_path / "twin.pt", values=True).equal
    assert ckptmap.verify(
        tmp_path / "out.pt", against=tmp_path / "net.pt", adapter=tmp_path / "adapter"
    ).ok
    with pytest.raises(
        LoadError, match="load it with strip_prefix='net': 21 of 21 names match then"
    ):
        ckptmap.load(tmp_path / "net.pt", wrapped)
    report = ckptmap.load(tmp_path / "net.pt", wrapped, strip_prefix="net")
    assert len(report.left) == 4 and not report.missing


def test_a_resumed_run_by_other_names(written: Callable[[str, bool], Path]) -> None:
    """`load` renames moments with their weights, whether the file has them by index or by name."""
    for name in ("training_script", "dcp_by_name"):
        model = tiny(RECIPE)
        optimizer = optimizer_for(model)
        ckptmap.load(written(name, True), model, optimizer, rename={"net.{x}": "{x}"})
        twin = tiny(RECIPE)
        other = optimizer_for(twin)
        ckptmap.load(written(name, False), twin, other)
        assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        states = zip(optimizer.state.values(), other.state.values(), strict=True)
        assert optimizer.state and all(a[k].equal(b[k]) for a, b in states for k in b)
        with pytest.raises(LoadError, match=r"1 missing: norm\.weight; load with strict=False"):
            ckptmap.load(written(name, True), model, strip_prefix="net", drop="norm.*")


def test_names_like_a_checkpoint_that_lacks_some(tmp_path: Path) -> None:
    torch.save({f"{k}.weight": torch.ones(2) for k in "abc"}, tmp_path / "in.pt")
    torch.save({"module.a.weight": torch.ones(2)}, tmp_path / "like.pt")
    plan = ckptmap.plan(tmp_path / "in.pt", "full", names_like=tmp_path / "like.pt")
    assert (
        "b.weight and 1 more: not in the checkpoint of --names-like, so plain names are written"
        in plan.notes
    )
