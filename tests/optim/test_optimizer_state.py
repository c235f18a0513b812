"""Optimizer state by FQN, from every key form: read, written, and resumed by torch's own loaders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError, PlanError, SourceError
from ckptmap.live.state_dict.hooks import install
from ckptmap.optim.align_order import SORTED_TOO, align, align_named
from ckptmap.optim.index_order import read_order
from ckptmap.planning.saved_plan import replan
from tests.corpus import CASES, Corpus, names
from tests.corpus.models import Recipe, compiled, optimizer_for, tiny, tiny_llama
from tests.corpus.ranks import run_ranks
from tests.ranks.optimizer import STEPS, losses
from tests.support.same_tensors import assert_same

MODEL_ORDER = "the order of the saved model dict"
TRAINED = names(optimizer=("fqn", "index"))
SMALL = Recipe(vocab=257, hidden=16, ffn=23, layers=2)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        n: dict(optimizer.state[p]) for n, p in model.named_parameters() if p in optimizer.state
    }


def assert_state(ckpt: ckptmap.Checkpoint, truth: Mapping[str, Mapping[str, Any]]) -> None:
    """Every tensor bit for bit, every plain value, and nothing else."""
    found = {*ckpt.optimizer, *ckpt.optimizer_values}
    assert found == {fqn for fqn, state in truth.items() if state}
    for fqn, state in truth.items():
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        assert set(ckpt.optimizer.get(fqn, {})) == set(tensors), fqn
        for name, value in tensors.items():
            assert_same(ckpt.optimizer[fqn][name].read(), value, f"{fqn} {name}")
        plain = {name: value for name, value in state.items() if name not in tensors}
        assert ckpt.optimizer_values.get(fqn, {}) == plain


# ------------------------------------------------------------------ every kind of state


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    made: nn.Module = get_peft_model(
        tiny(SMALL), LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    )
    return made


def frozen() -> nn.Module:
    model = tiny(SMALL)
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def frozen_embedding() -> nn.Module:
    model = tiny(SMALL)
    model.embed.requires_grad_(False)
    return model


def adamw(model: nn.Module, **about: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **about)


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def split(model: nn.Module) -> torch.optim.Optimizer:
    """Three groups, the last of its own learning rate, by a tensor."""
    found = list(model.named_parameters())
    rest = [(n, p) for n, p in found if not n.startswith("score")]
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for n, p in found if n.startswith("score")], "lr": torch.tensor(0.003)},
        ],
        lr=1e-2,
    )


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


def sgd(model: nn.Module, **about: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, **about)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def small() -> nn.Module:
    return tiny(SMALL)


def tied() -> nn.Module:
    return tiny(Recipe(vocab=257, hidden=16, ffn=23, layers=2, tied=True))


Build = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]
KINDS: dict[str, Build] = {
    "adamw": (small, adamw),
    "amsgrad": (small, lambda model: adamw(model, amsgrad=True)),
    "sgd": (small, sgd),
    "momentum": (small, lambda model: sgd(model, momentum=0.9)),
    "adafactor": (small, adafactor),
    "groups": (small, split),
    "named": (small, named),
    "frozen in the groups": (frozen, adamw),
    "frozen outside": (frozen_embedding, trainable),
    "lora": (lora, trainable),
    "tied": (tied, adamw),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    """A run saved as most are, its state then, and the losses had it gone on."""
    build, make = KINDS[kind]
    model = build()
    optimizer = make(model)
    losses(model, optimizer)
    path = tmp_path_factory.mktemp("run") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    truth = {
        fqn: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        for fqn, state in moments_of(model, optimizer).items()
    }
    return path, truth, losses(model, optimizer, STEPS)


def test_state_is_read_by_name(kind: str, run: Any) -> None:
    path, truth, _ = run
    with ckptmap.open(path) as ckpt:
        assert not ckpt.optimizer_by_index
        assert ckpt.optimizer_order == (
            "param_names in the groups" if kind == "named" else MODEL_ORDER
        )
        assert_state(ckpt, truth)
        build, make = KINDS[kind]
        model = build()
        fqns = {id(p): n for n, p in model.named_parameters()}
        groups = make(model).param_groups
        assert [group["params"] for group in ckpt.optimizer_groups] == [
            [fqns[id(p)] for p in group["params"]] for group in groups
        ]
        assert [g["weight_decay"] for g in ckpt.optimizer_groups] == [
            g["weight_decay"] for g in groups
        ]


@pytest.mark.parametrize("keys", ["index", "fqn"])
@pytest.mark.parametrize("way", ["full", "fsdp2"])
def test_resumed_run_goes_on_as_if_never_stopped(
    kind: str, run: Any, keys: str, way: str, tmp_path: Path
) -> None:
    """Straight, and by way of a DCP directory of three ranks; loaded as torch loads its own."""
    path, truth, expected = run
    source = path
    if way == "fsdp2":
        ckptmap.convert(path, tmp_path / "dcp", to="fsdp2", world_size=3)
        source = tmp_path / "dcp"
        with ckptmap.open(source) as ckpt:
            assert_state(ckpt, truth)
        assert ckptmap.verify(source, against=path).ok
    ckptmap.convert(source, tmp_path / "out.pt", to="full", optimizer_keys=keys)
    assert ckptmap.verify(tmp_path / "out.pt", against=source).ok
    assert ckptmap.diff(tmp_path / "out.pt", path, values=True).equal
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    build, make = KINDS[kind]
    model = build()
    optimizer = make(model)
    model.load_state_dict(state["model"])
    if keys == "index":
        optimizer.load_state_dict(state["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert losses(model, optimizer, STEPS) == expected


def test_numbers_for_steps_and_lists_of_one_optimizer(tmp_path: Path) -> None:
    """As torch < 1.12 and Lightning save: `step` an int, `optimizer_states` a list."""
    model = tiny(SMALL)
    optimizer = adamw(model)
    losses(model, optimizer)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = int(entry["step"])
    saved = {"state_dict": model.state_dict(), "optimizer_states": [state], "epoch": 2}
    torch.save(saved, tmp_path / "run.ckpt")
    truth = {n: {**optimizer.state[p], "step": STEPS} for n, p in model.named_parameters()}
    ckptmap.convert(tmp_path / "run.ckpt", tmp_path / "out", to="fsdp2", world_size=2)
    for path in ("run.ckpt", "out"):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert_state(ckpt, truth)
            assert ckpt.extra == {"epoch": 2}


def test_groups_that_list_names_and_no_keys(tmp_path: Path) -> None:
    """torch_checkpointing's `optimizer_transform_pre` keys state by name, and drops `params` from the groups."""
    transforms = pytest.importorskip("torch_checkpointing.state_transformations")
    model = tiny(SMALL)
    optimizer = torch.optim.AdamW([*model.named_parameters()], lr=1e-2)
    losses(model, optimizer)
    state = transforms.optimizer_transform_pre(optimizer.state_dict())
    assert "params" not in state["param_groups"][0]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out", to="fsdp2", world_size=2)
    for path in ("run.pt", "out"):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert_state(ckpt, moments_of(model, optimizer))
            (group,) = ckpt.optimizer_groups
            assert group["params"] == [name for name, _ in model.named_parameters()]
            assert not ckpt.optimizer_reader.raw.rest


def test_an_optimizer_of_any_name(tmp_path: Path) -> None:
    """A dict of what `optimizer.state_dict()` gives, and nothing else, is one; of two, neither."""
    model = tiny(SMALL)
    optimizer = adamw(model)
    losses(model, optimizer)
    saved: dict[str, Any] = {
        "model_state": model.state_dict(), "optimizer_state": optimizer.state_dict(), "epoch": 2
    }  # fmt: skip
    torch.save(saved, tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out", to="fsdp2-bf16", world_size=2)
    for path in ("run.pt", "out"):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert set(ckpt) == set(saved["model_state"]) and ckpt.extra == {"epoch": 2}
            assert_state(ckpt, moments_of(model, optimizer))
    torch.save({**saved, "other_state": optimizer.state_dict()}, tmp_path / "two.pt")
    with ckptmap.open(tmp_path / "two.pt") as ckpt:
        assert set(ckpt) == set(saved["model_state"]) and ckpt.optimizer == {}
        assert {path[0] for path in ckpt.other} == {"optimizer_state", "other_state"}


def test_weights_are_cast_and_moments_are_not(tmp_path: Path) -> None:
    model = tiny(SMALL)
    optimizer = adamw(model)
    losses(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out", to="fsdp2-bf16", world_size=2)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt["norm.weight"].dtype == "bfloat16"
        assert_state(ckpt, moments_of(model, optimizer))
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "run.pt").ok


# ------------------------------------------------------------------ FSDP2 on 2 ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """One process trains and is converted; 2 ranks of FSDP2 go on, and train a run of their own."""
    folder = tmp_path_factory.mktemp("two")
    model = tiny()
    optimizer = optimizer_for(model)
    losses(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / "one.pt")
    expected = losses(model, optimizer, STEPS)
    ckptmap.convert(folder / "one.pt", folder / "converted", to="fsdp2", world_size=2)
    run_ranks("tests.ranks.optimizer", 2, [str(folder)])
    return folder, expected


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_two_ranks_go_on_from_one_process(two_ranks: Any, wrapper: str) -> None:
    folder, expected = two_ranks
    found = json.loads((folder / "losses.json").read_text())
    torch.testing.assert_close(found[wrapper], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_one_process_goes_on_from_fsdp2(two_ranks: Any, form: str, tmp_path: Path) -> None:
    folder, _ = two_ranks
    truth = torch.load(folder / "t", weights_only=True)
    with ckptmap.open(folder / form) as ckpt:
        assert ckpt.optimizer_order == "" and not ckpt.optimizer_by_index
        assert_state(ckpt, truth["optimizer"])
        decays = [group["weight_decay"] for group in ckpt.optimizer_groups]
        assert decays == [0.1, 0.0]
        assert all("norm" in fqn for fqn in ckpt.optimizer_groups[1]["params"])
    ckptmap.convert(folder / form, tmp_path / "out.pt", to="full", optimizer_keys="index")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    model = tiny()
    model.load_state_dict(state["model"])
    optimizer = optimizer_for(model, lr=1.0)
    optimizer.load_state_dict(state["optimizer"])
    expected = json.loads((folder / "losses.json").read_text())["went_on"]
    torch.testing.assert_close(losses(model, optimizer, STEPS), expected, rtol=1e-6, atol=0)


def test_flattened_keys_are_written_as_torch_flattens(two_ranks: Any, tmp_path: Path) -> None:
    folder, _ = two_ranks
    ckptmap.convert(
        folder / "nested", tmp_path / "out", to="fsdp2", world_size=2, optimizer_keys="flattened"
    )
    with ckptmap.open(tmp_path / "out") as mine, ckptmap.open(folder / "flattened") as theirs:
        assert set(mine.roles.optimizer) == set(theirs.roles.optimizer)
    assert ckptmap.diff(tmp_path / "out", folder / "flattened", values=True).equal


# ------------------------------------------------------------------ every case of the corpus


@pytest.mark.parametrize("to", ["full", "fsdp2"])
@pytest.mark.parametrize(
    "name", [n for n in TRAINED if CASES[n].order or CASES[n].optimizer == "fqn"]
)
def test_corpus_state_is_carried(corpus: Corpus, name: str, to: str, tmp_path: Path) -> None:
    case = corpus[name]
    plan = ckptmap.plan(case.path, to, drop=case.spec.opaque)
    assert (f"optimizer order: {case.spec.order}" in plan.notes) == bool(case.spec.order)
    plan.execute(tmp_path / "out")
    assert ckptmap.verify(tmp_path / "out", against=case.path).ok
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert_state(ckpt, case.optimizer)
        listed = [fqn for group in ckpt.optimizer_groups for fqn in group["params"]]
        assert sorted(listed) == sorted(case.optimizer)


# ------------------------------------------------------------------ which index is which


@pytest.fixture(scope="module")
def raw(corpus: Corpus) -> Any:
    """A raw optimizer.state_dict() in DCP: integers became strings, nothing tells the order."""
    return corpus["dcp_single_raw_optimizer"]


def decay_groups() -> list[list[str]]:
    every = [n for n, _ in tiny().named_parameters()]
    return [[n for n in every if "norm" not in n], [n for n in every if "norm" in n]]


def test_given_order_names_the_state_and_survives_a_saved_plan(raw: Any, tmp_path: Path) -> None:
    with ckptmap.open(raw.path, param_order=decay_groups()) as ckpt:
        assert ckpt.optimizer_order == "as given"
        assert_state(ckpt, raw.optimizer)
    order = tuple(map(tuple, decay_groups()))
    plan = ckptmap.plan(raw.path, "full", param_order=order)
    plan.save(tmp_path / "plan.json")
    again = replan(tmp_path / "plan.json")
    assert "optimizer order: as given" in again.notes
    again.execute(tmp_path / "out.pt")
    assert ckptmap.verify(tmp_path / "out.pt", against=raw.path).ok


def test_given_order_goes_before_all_others(corpus: Corpus) -> None:
    case = corpus["torch_named_optimizer"]
    names = [f"_orig_mod.{n}" for n, _ in tiny().named_parameters()]
    a, b = (names.index(f"_orig_mod.layers.0.self_attn.{x}_proj.weight") for x in "kv")
    names[a], names[b] = names[b], names[a]
    with ckptmap.open(case.path, param_order=[names]) as ckpt:
        assert ckpt.optimizer_order == "as given"
        swapped = ckpt.optimizer["layers.0.self_attn.v_proj.weight"]["exp_avg"].read()
        truth = case.optimizer["layers.0.self_attn.k_proj.weight"]["exp_avg"]
        assert_same(swapped, truth, "k's moments, said to be v's")


def test_command_line_takes_an_order_file(
    raw: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptmap_cli.main import main

    (tmp_path / "order").write_text("\n\n".join("\n".join(group) for group in decay_groups()))
    out = tmp_path / "out.pt"
    args = ["convert", str(raw.path), str(out), "--to", "full", "--optimizer-keys", "index"]
    assert main([*args, "--quiet"]) == 2
    assert "--param-order FILE" in capsys.readouterr().err
    assert main([*args, "--param-order", str(tmp_path / "order"), "--quiet"]) == 0
    state = torch.load(out, weights_only=True)["optimizer"]
    assert [group["param_names"] for group in state["param_groups"]] == decay_groups()
    with ckptmap.open(out) as ckpt:
        assert ckpt.optimizer_order == "param_names in the groups"
        assert_state(ckpt, raw.optimizer)
    assert main(["verify", str(out), "--against", str(raw.path)]) == 0


def test_wrong_orders_are_refused_by_what_is_wrong(raw: Any) -> None:
    decay, rest = decay_groups()
    wrong: list[tuple[Any, str]] = [
        ([decay + rest], r"1 group of 41 parameters, the optimizer 2 groups"),
        ([decay[1:], rest], "has 2 groups of 33, 7 parameters"),
        ([[*decay[1:], decay[0]], rest], r"parameter 0 cannot be .*: its exp_avg has shape"),
        ([["nothing", *decay[1:]], rest], "names 'nothing', which is not one of its weights"),
        ([[*decay[:-1], decay[0]], rest], "names a parameter twice|cannot be|without their"),
    ]
    for order, text in wrong:
        with pytest.raises(SourceError, match=text):
            ckptmap.open(raw.path, param_order=order)


def test_nothing_is_chosen_where_shapes_allow_two_orders(tmp_path: Path) -> None:
    """Equal layers in two groups: which layer is in which, the file does not say."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 3))
    named = dict(model.named_parameters())
    groups = [
        [named[f"{i}.{x}"] for i in ids for x in ("weight", "bias")] for ids in ((0, 2), (1, 3))
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    plan = ckptmap.plan(tmp_path / "run.pt", "full")
    with pytest.raises(PlanError, match="the shapes allow several orders"):
        plan.require_resolved()
    order = [[n for i in ids for n in (f"{i}.weight", f"{i}.bias")] for ids in ((0, 2), (1, 3))]
    with ckptmap.open(tmp_path / "run.pt", param_order=order) as ckpt:
        assert_state(ckpt, moments_of(model, optimizer))


class Stack(nn.Module):
    """Twelve layers of one shape each, whose names sort as they stand in a layer, but not 10, 2."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (
            nn.ModuleDict({"attn": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(12)
        )
        self.blocks = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
        return x


def decaying(model: nn.Module) -> list[list[str]]:
    """As minGPT makes its groups: of sets of names, sorted."""
    names = {name for name, _ in model.named_parameters()}
    decay = {name for name in names if name.endswith("attn.weight")}
    return [sorted(decay), sorted(names - decay)]


def in_groups(model: nn.Module, order: list[list[str]]) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.AdamW([{"params": [named[n] for n in group]} for group in order])


def stepped(model: nn.Module, order: list[list[str]], path: Path) -> torch.optim.Optimizer:
    optimizer = in_groups(model, order)
    model(torch.rand(3, 8)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return optimizer


def test_groups_of_sorted_names_are_not_read_in_the_models_order(tmp_path: Path) -> None:
    model = Stack()
    order = decaying(model)
    optimizer = stepped(model, order, tmp_path / "run.pt")
    with pytest.raises(PlanError, match="that of sorted names"):
        ckptmap.plan(tmp_path / "run.pt", "full").require_resolved()
    with pytest.raises(CkptmapError, match="that of sorted names"):
        ckptmap.load(tmp_path / "run.pt", model, in_groups(model, order))
    with ckptmap.open(tmp_path / "run.pt", param_order=order) as ckpt:
        assert_state(ckpt, moments_of(model, optimizer))


def test_a_live_optimizer_in_an_order_of_its_own_is_heard(tmp_path: Path) -> None:
    """One group: the file alone says nothing against the model's order."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12)))
    order = [sorted(name for name, _ in model.named_parameters())]
    optimizer = stepped(model, order, tmp_path / "run.pt")
    truth = moments_of(model, optimizer)
    again = in_groups(model, order)
    with pytest.raises(CkptmapError, match=r"2 of the optimizer is 2\.weight by .* and 10\.weight"):
        ckptmap.load(tmp_path / "run.pt", model, again)
    assert not again.state
    with ckptmap.open(tmp_path / "run.pt", param_order=order) as ckpt:
        ckptmap.load(ckpt, model, again)
    with install(model, third := in_groups(model, order)):
        saved = torch.load(tmp_path / "run.pt")["optimizer"]
        saved["state"] = {
            key: {name: value.double() for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        third.load_state_dict(saved)
    for found in (again, third):
        for fqn, state in moments_of(model, found).items():
            assert torch.equal(state["exp_avg"], truth[fqn]["exp_avg"]), fqn


def test_a_frozen_layer_left_out_may_be_any_of_its_kind(tmp_path: Path) -> None:
    model = frozen()
    optimizer = trainable(model)
    losses(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    with ckptmap.open(tmp_path / "run.pt") as ckpt:
        assert ckpt.optimizer_by_index
        assert ckpt.optimizer == {} and ckpt.optimizer_groups == []
    order = [[n for n, p in model.named_parameters() if p.requires_grad]]
    with ckptmap.open(tmp_path / "run.pt", param_order=order) as ckpt:
        assert_state(ckpt, moments_of(model, optimizer))


def test_a_sorted_model_dict_has_no_order(tmp_path: Path) -> None:
    model = tiny(SMALL)
    optimizer = adamw(model)
    losses(model, optimizer)
    weights = dict(sorted(model.state_dict().items()))
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    plan = ckptmap.plan(tmp_path / "run.pt", "full")
    with pytest.raises(PlanError, match="alphabetical order"):
        plan.require_resolved()


def test_alignment_counts_readings_and_skips_places() -> None:
    equal = str.__eq__
    assert align([["a", "c"], ["b"]], ["a", "b", "c"], equal) == [[0, 2], [1]]
    assert align([["a", "c"]], ["a", "x", "c", "x"], equal) == [[0, 2]]
    assert align([["a"], ["a"]], ["a", "a"], equal) == "the shapes allow several orders"
    assert align([["a"]], ["a", "a"], equal) == "the shapes allow several orders"
    assert align([["b", "a"]], ["a", "b"], equal) == "the shapes do not fit its order"
    many = align([["a"] * 30] * 4, ["a"] * 120, equal)
    assert many == "the shapes allow many orders"


def test_alignment_beside_sorted_names() -> None:
    equal = str.__eq__
    names = ["2.a", "2.b", "10.a", "10.b"]
    assert align_named([["a", "a"], ["b", "b"]], "abab", names, equal) == SORTED_TOO
    assert align_named([["a", "b", "a", "b"], []], "abab", names, equal) == [[0, 1, 2, 3], []]
    assert align_named([["a", "c"], ["b", "b"]], "abcb", names, equal) == [[0, 2], [1, 3]]
    assert align_named([["a", "a"], ["b", "b"]], "abab", sorted(names), equal) == [[0, 2], [1, 3]]


def test_order_files(tmp_path: Path) -> None:
    file = tmp_path / "order"
    expected = (("a.weight", "a.bias"), ("b.weight",))
    file.write_text("# of run 7\na.weight\na.bias  # frozen\n\n\nb.weight\n")
    assert read_order(file) == expected
    file.write_text(json.dumps(expected))
    assert read_order(file) == expected
    file.write_text(json.dumps(["a", "b"]))
    assert read_order(file) == (("a", "b"),)
    for text in ('[["a", 1]]', "[1, 2]", "[", '[["a"], "b"]'):
        file.write_text(text)
        with pytest.raises(SourceError, match="is not a parameter order"):
            read_order(file)
    with pytest.raises(SourceError, match="is not a parameter order"):
        read_order(tmp_path / "nothing")


# ------------------------------------------------------------------ transformers


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """What transformers' Trainer leaves in checkpoint-2: AdamW in decay and no-decay groups."""
    from transformers import Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("trainer")
    model = tiny_llama(dtype=torch.float32)
    tokens = torch.arange(40).view(4, 10)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=2, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, disable_tqdm=True, weight_decay=0.1, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    run = Trainer(model, arguments, train_dataset=rows)
    run.train()
    inner: Any = run.optimizer
    return folder / "checkpoint-2", moments_of(model, getattr(inner, "optimizer", inner))


def one_file(checkpoint: Path, folder: Path) -> Path:
    """The same tensors in one file, the model's as safetensors sorts them, config beside."""
    from safetensors.torch import load_file

    weights = dict(sorted(load_file(checkpoint / "model.safetensors").items()))
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    torch.save({"model": weights, "optimizer": optimizer}, folder / "run.pt")
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder / "run.pt"


def test_trainer_groups_are_told_by_the_class(trainer: Any, tmp_path: Path) -> None:
    checkpoint, truth = trainer
    path = one_file(checkpoint, tmp_path)
    with ckptmap.open(path) as ckpt:
        assert ckpt.optimizer_by_index  # what inspect says: no class is built for it
        assert_state(ckpt, truth)
        assert "Trainer's decay and no-decay groups" in ckpt.optimizer_order
        assert not ckpt.optimizer_by_index
    with ckptmap.open(path) as ckpt:
        assert "optimizer" in ckptmap.plan(ckpt, "hf").dropped
        assert ckpt.optimizer_by_index  # nor is one built for what is left behind
    ckptmap.convert(path, tmp_path / "out", to="fsdp2", world_size=2)
    assert ckptmap.verify(tmp_path / "out", against=path).ok
    (tmp_path / "config.json").unlink()
    with pytest.raises(PlanError, match="alphabetical order"):
        ckptmap.plan(path, "full").require_resolved()
    with ckptmap.open(path, like=checkpoint / "config.json") as ckpt:
        assert_state(ckpt, truth)


def test_trainer_directory(trainer: Any) -> None:
    checkpoint, truth = trainer
    with ckptmap.open(checkpoint) as ckpt:
        assert_state(ckpt, truth)


def test_a_config_of_another_model_class_leaves_the_order_unknown(
    trainer: Any, tmp_path: Path
) -> None:
    path = one_file(trainer[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"num_hidden_layers": 1},
        {"architectures": ["os"]},
        {"architectures": ["Trainer"]},
        {"model_type": "no such type"},
        {"attention_bias": True},
        {"intermediate_size": 96},
        {"num_hidden_layers": 10**9},
        {"attn_implementation": "someone/kernel", "num_hidden_layers": 1},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        plan = ckptmap.plan(path, "full")
        with pytest.raises(PlanError, match="keyed by parameter index"):
            plan.require_resolved()


# ------------------------------------------------------------------ every key accounted for


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State by name, of a compiled model, with an entry that belongs to no weight."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = compiled(tiny(SMALL))
    optimizer = optimizer_for(model)
    losses(model._orig_mod, optimizer)  # type: ignore[arg-type]
    state = get_optimizer_state_dict(model, optimizer)
    fused: dict[str, Any] = {"exp_avg": torch.ones(3), "step": 1}
    state["state"]["layers.0.qkv.weight"] = fused
    state["scaler"] = torch.ones(2)
    path = tmp_path_factory.mktemp("named") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    return path


def test_state_of_no_weight_is_unresolved_unless_dropped(by_name: Path) -> None:
    plan = ckptmap.plan(by_name, "full")
    with pytest.raises(PlanError, match=r"optimizer\.layers\.0\.qkv\.weight: .* no weight"):
        plan.require_resolved()
    plan = ckptmap.plan(by_name, "full", drop=("optimizer.layers.0.qkv.*",))
    plan.require_resolved()
    assert plan.dropped == {"optimizer.layers.0.qkv.weight": "--drop optimizer.layers.0.qkv.*"}
    assert not any("qkv" in step.fqn for step in plan.steps)


def test_state_goes_with_its_weight(by_name: Path, tmp_path: Path) -> None:
    plan = ckptmap.plan(by_name, "fsdp2", exclude=("layers.1.*", "lm_head.*"), drop=("*qkv*",))
    plan.require_resolved()
    assert plan.dropped["optimizer.lm_head.weight"] == "with its weight: --exclude lm_head.*"
    plan.execute(tmp_path / "out")
    with ckptmap.open(tmp_path / "out") as ckpt:
        listed = {fqn for group in ckpt.optimizer_groups for fqn in group["params"]}
        assert set(ckpt.optimizer) == listed
        assert listed < set(ckpt)
        assert_same(ckpt.optimizer_reader.named().rest["scaler",].read(), torch.ones(2), "scaler")
    assert ckptmap.verify(tmp_path / "out", against=by_name).ok
    kept = ckptmap.plan(by_name, "full", drop=("*qkv*", "optimizer.scaler"))
    assert kept.dropped["optimizer.scaler"] == "--drop optimizer.scaler"


def test_key_forms_that_a_target_cannot_hold(by_name: Path) -> None:
    with pytest.raises(PlanError, match="can be written to one file of whole tensors only"):
        ckptmap.plan(by_name, "fsdp2", optimizer_keys="index")
    with pytest.raises(PlanError, match="choose one of flattened, index, fqn"):
        ckptmap.plan(by_name, "full", optimizer_keys="name")


def test_unknown_structure_is_unresolved(tmp_path: Path) -> None:
    state = {"master": {"w": torch.ones(3)}, "step": 3}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": state}, tmp_path / "run.pt")
    plan = ckptmap.plan(tmp_path / "run.pt", "full")
    with pytest.raises(PlanError, match="keys of no known form"):
        plan.require_resolved()
    ckptmap.plan(tmp_path / "run.pt", "full", optimizer="drop").require_resolved()


def test_repeated_tensors_of_a_flattened_group_must_agree(tmp_path: Path) -> None:
    """A learning rate that is a tensor, repeated for each parameter: written once, if it is one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = tiny(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    losses(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    saved = {"model": model.state_dict(), "optimizer": state}
    torch.save(saved, tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out.pt", to="full", keep_layout=False)
    group = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [g["lr"] for g in group] == [torch.tensor(0.01)]
    state["param_groups.norm.weight.lr"] = torch.tensor(0.02)
    torch.save(saved, tmp_path / "run.pt")
    with pytest.raises(CkptmapError, match=r"param_groups\.0\.lr"):
        ckptmap.convert(tmp_path / "run.pt", tmp_path / "no.pt", to="full", keep_layout=False)
    assert not (tmp_path / "no.pt").exists()


def test_betas_that_are_tensors(tmp_path: Path) -> None:
    """They move, are compared, and become a live optimizer's betas, whatever its own are."""
    stored, other = (tuple(map(torch.tensor, betas)) for betas in ((0.5, 0.75), (0.25, 0.5)))
    model = tiny(SMALL)
    optimizer = torch.optim.Adam(model.named_parameters(), betas=stored, foreach=False)
    losses(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "dcp", to="fsdp2", world_size=2)
    assert ckptmap.verify(tmp_path / "dcp", against=tmp_path / "run.pt").ok
    saved["optimizer"]["param_groups"][0]["betas"] = other
    torch.save(saved, tmp_path / "else.pt")
    report = ckptmap.verify(tmp_path / "dcp", against=tmp_path / "else.pt")
    assert not report.ok and "betas" in str(report)
    for betas in (other, (0.25, 0.5)):
        live = torch.optim.Adam(model.parameters(), betas=betas, foreach=False)
        found = ckptmap.load(tmp_path / "dcp", model, live)
        assert live.param_groups[0]["betas"] == (0.5, 0.75)
        assert isinstance(live.param_groups[0]["betas"][0], type(betas[0]))
        assert found.state is not None
        assert "betas: was (0.25, 0.5) here, now (0.5, 0.75)" in str(found.state.settings)


@pytest.mark.parametrize("order", [["a.weight", "b.weight"], "a.weight", [1], ["a", ["b"]]])
def test_an_order_of_parameters_is_a_list_of_lists(order: Any, tmp_path: Path) -> None:
    """A list of names alone was taken for groups of letters."""
    weights = {"a.weight": torch.ones(2), "b.weight": torch.ones(3)}
    optimizer = torch.optim.SGD([torch.nn.Parameter(value) for value in weights.values()], lr=0.1)
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(ArgumentError, match="expected a list of names for each group") as caught:
        ckptmap.open(tmp_path / "x.pt", param_order=order)
    assert caught.value.code == "CKM516"
    if order == ["a.weight", "b.weight"]:
        assert "param_order=[[...]]" in caught.value.hint
        ckptmap.open(tmp_path / "x.pt", param_order=[order]).close()
