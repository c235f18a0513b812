"""Names change during a conversion: of quantized sources, optimizer state, shards, tensors in memory.

What the peers' own code makes of the same numbers is held in `test_goldens` and
`test_convert`; here the expected tensors are torch's own, or come from the tested rules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

import ckptmap
from ckptmap.errors import PlanError, RunError
from ckptmap.mapping.translate_state_dict import translate_names
from ckptmap.operations.convert import run
from ckptmap.planning.options import RunOptions
from ckptmap.planning.saved_plan import replan
from ckptmap.tensors import Box
from ckptmap.testing.base import bytes_read
from tests.corpus.ranks import run_ranks
from tests.mapping.test_convert import write
from tests.support.hub.server import Hub
from tests.support.mapping_state import config_of, hub_state
from tests.test_imports import imported_by

HEADS, KV_HEADS, HEAD, HIDDEN = 8, 4, 16, 128
State = dict[str, torch.Tensor]


def config(**changed: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD, "intermediate_size": 192, "vocab_size": 80, "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changed})


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(config()).to(torch.bfloat16)


@pytest.fixture(scope="module")
def published(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it: safetensors and config.json."""
    path = tmp_path_factory.mktemp("llama") / "hf"
    llama.save_pretrained(path)
    return path


def meta(state: State) -> State:
    """Meta's names and rows, by torch's own view and transpose."""
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }  # fmt: skip
    found = {}
    for key, tensor in state.items():
        for old, new in names.items():
            key = key.replace(old, new)
        if key.endswith(("wq.weight", "wk.weight")):
            rows, width = tensor.shape
            halves = tensor.view(rows // HEAD, 2, HEAD // 2, width)
            tensor = halves.transpose(1, 2).reshape(rows, width)
        found[key.removeprefix("model.")] = tensor
    return found


def read(path: Path) -> State:
    with ckptmap.open(path) as ckpt:
        return {fqn: ckpt[fqn].read() for fqn in ckpt}


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key])
        for key in expected
    )


# --------------------------------------------------------------------------- dense, any layout


@pytest.mark.parametrize(
    ("to", "options"),
    [("full", {}), ("compiled", {}), ("fsdp2", {"world_size": 3}), ("fsdp2-ranks", {"world_size": 2}),
     ("fsdp2", {"mesh": "replicate=2,shard=2"})],
)  # fmt: skip
def test_meta_names_in_any_setup(
    to: str, options: dict[str, Any], llama: LlamaForCausalLM, published: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plan = ckptmap.plan(published, to, names="meta", **options)
    assert plan.fidelities() == {"bytes": 17, "exact": 4}
    plan.execute(out)
    assert same(read(out), meta(llama.state_dict()))
    assert ckptmap.verify(out, published).ok


def test_a_wrong_row_does_not_pass_verification(published: Path, tmp_path: Path) -> None:
    """The check is of where every row went: as many permuted rows in another order fail."""
    out = tmp_path / "out.pt"
    ckptmap.convert(published, out, to="full", names="meta")
    other = tmp_path / "other"
    model = LlamaForCausalLM.from_pretrained(published, dtype="auto")
    with torch.no_grad():
        rows = model.model.layers[1].self_attn.q_proj.weight
        rows[:2] = rows[:2].flip(0).clone()
    model.save_pretrained(other)
    report = ckptmap.verify(out, other)
    assert not report.ok
    assert "layers.1.attention.wq.weight" in report.problems[0]


def test_from_three_ranks_back_to_the_hub(published: Path, tmp_path: Path) -> None:
    """The ranks' cuts of 43 rows and heads of 16 have no boundary in common."""
    sharded, back = tmp_path / "dcp", tmp_path / "hf"
    ckptmap.convert(published, sharded, to="fsdp2", names="meta", world_size=3)
    ckptmap.convert(sharded, back, to="hf", names="hf", config_from=str(published))
    assert same(load_file(back / "model.safetensors"), load_file(published / "model.safetensors"))


def test_there_and_back_is_held_against_the_original(published: Path, tmp_path: Path) -> None:
    """The original has the names of the way back already: its values are compared as they are."""
    one, back, other = tmp_path / "meta.pt", tmp_path / "hf", tmp_path / "other"
    ckptmap.convert(published, one, to="full", names="meta")
    ckptmap.convert(one, back, to="hf", names="hf", config_from=str(published))
    assert ckptmap.verify(back, published).ok and ckptmap.verify(back, one).ok
    model = LlamaForCausalLM.from_pretrained(published, dtype="auto")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 5] += 1
    model.save_pretrained(other)
    report = ckptmap.verify(back, other)
    assert len(report.problems) == 1 and "layers.0.self_attn.k_proj" in report.problems[0]


def test_through_the_hub_and_no_row_moved(published: Path, tmp_path: Path) -> None:
    """Two permutations that undo each other end as a rename."""
    one = tmp_path / "meta.pt"
    ckptmap.convert(published, one, to="full", names="meta")
    plan = ckptmap.plan(one, "full", names="torchtune", config_from=str(published))
    assert plan.fidelities() == {"bytes": 21}
    plan.execute(tmp_path / "tune.pt")
    direct = tmp_path / "direct.pt"
    ckptmap.convert(published, direct, to="full", names="torchtune")
    assert same(read(tmp_path / "tune.pt"), read(direct))


def test_one_shard_alone(published: Path) -> None:
    """Rows 24 to 32 of a permuted matrix are read from its 8 rows, not from the whole."""
    with ckptmap.open(published) as ckpt:
        plan = ckptmap.plan(ckpt, "full", names="meta")
        lazy = plan.ckpt["layers.0.attention.wq.weight"]
        with bytes_read() as read_nbytes:
            found = lazy[24:32]
        whole = lazy.read()
    assert torch.equal(found, whole[24:32])
    # Half a head: rows 8 to 12 and 16 + ... of each half, with the gap between them at most.
    assert read_nbytes[0] < 32 * HIDDEN * 2


def test_memory_bound_holds(published: Path, tmp_path: Path) -> None:
    """A budget smaller than any that is given gives the same bytes."""
    for name, limit in (("small", 1), ("large", 64 << 20)):
        plan = ckptmap.plan(published, "full", names="llama/gpt-fast")
        run(plan, tmp_path / name, RunOptions(max_memory=limit, threads=1))
    assert (tmp_path / "small").read_bytes() == (tmp_path / "large").read_bytes()


def test_moe_stack_and_cut(tmp_path: Path) -> None:
    """Experts of a directory, stacked and cut over ranks by their first dim, and back."""
    write(tmp_path / "hf", hub_state("mixtral"), "mixtral")
    ckptmap.convert(tmp_path / "hf", tmp_path / "out", to="fsdp2", names="hf-memory", world_size=3)
    found = read(tmp_path / "out")
    expected = translate_names(hub_state("mixtral"), "hf-memory", config_of("mixtral"))
    assert same(found, expected)
    first = "model.layers.0.mlp.experts.gate_up_proj"
    state = hub_state("mixtral")
    for expert, fused in enumerate(found[first]):
        at = f"model.layers.0.block_sparse_moe.experts.{expert}."
        assert torch.equal(fused, torch.cat([state[at + "w1.weight"], state[at + "w3.weight"]]))
    beside = str(tmp_path / "hf")
    ckptmap.convert(tmp_path / "out", tmp_path / "back", to="hf", names="hf", config_from=beside)
    assert same(read(tmp_path / "back"), state)


# --------------------------------------------------------------------------- plan, record, verify


def test_the_plan_can_be_saved_and_made_again(published: Path, tmp_path: Path) -> None:
    plan = ckptmap.plan(published, "full", names="meta")
    plan.save(tmp_path / "plan.json")
    assert replan(tmp_path / "plan.json").digest == plan.digest
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["options"]["names"] == "meta"
    assert "names: llama/hf -> llama/meta" in document["notes"]


def test_another_config_is_another_plan(published: Path, tmp_path: Path) -> None:
    """The same files of the same sizes, with rows in other places: not the same digest."""
    changed = json.loads((published / "config.json").read_text())
    changed["num_attention_heads"], changed["num_key_value_heads"], changed["head_dim"] = 16, 8, 8
    (tmp_path / "config.json").write_text(json.dumps(changed))
    one = ckptmap.plan(published, "full", names="meta")
    two = ckptmap.plan(published, "full", names="meta", config_from=str(tmp_path / "config.json"))
    assert [step.shape for step in one.steps] == [step.shape for step in two.steps]
    assert one.digest != two.digest


def test_verify_knows_the_mapping_when_its_file_is_gone(published: Path, tmp_path: Path) -> None:
    from ckptmap.mapping.catalog import find

    mine = tmp_path / "mine.toml"
    mine.write_text(Path(find("llama/meta")[0].path).read_text().replace('"meta"', '"mine"')
                    .replace("\nmeta = ", "\nmine = "))  # fmt: skip
    ckptmap.convert(published, tmp_path / "out.pt", to="full", names=str(mine))
    mine.unlink()
    assert ckptmap.verify(tmp_path / "out.pt", published).ok


def test_keys_that_are_dropped_or_unknown_are_accounted_for(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    state = dict(llama.state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    state["extra.buffer"] = torch.ones(3)
    torch.save(state, tmp_path / "model.pt")
    llama.config.save_pretrained(tmp_path)
    plan = ckptmap.plan(tmp_path / "model.pt", "full", names="meta")
    assert plan.dropped.keys() == {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert [item.key for item in plan.unresolved] == ["extra.buffer"]
    assert "no rule of llama/hf -> llama/meta knows it" in plan.unresolved[0].reason
    with pytest.raises(PlanError, match=r"extra\.buffer: no rule"):
        plan.execute(tmp_path / "out.pt")
    left = ckptmap.plan(tmp_path / "model.pt", "full", names="meta", drop=("extra.buffer",))
    assert not left.unresolved
    assert left.dropped["extra.buffer"] == "--drop extra.buffer"


def test_wrappers_go_first(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """torch.compile's segments are off before names are mapped, and on again as asked for."""
    wrapped = nn.ModuleDict({"_orig_mod": llama})
    torch.save(wrapped.state_dict(), tmp_path / "model.pt")
    llama.config.save_pretrained(tmp_path)
    ckptmap.convert(tmp_path / "model.pt", tmp_path / "out.pt", to="ddp", names="meta")
    keys = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "module.layers.0.attention.wq.weight" in keys


def test_keys_may_be_left_behind_by_either_name(published: Path, tmp_path: Path) -> None:
    """A key of the source that is excluded is not missed, and what it would be is not made; through
    the hub as well."""
    for number, pattern in enumerate(("lm_head.weight", "output.weight", "*layers.1.*q*")):
        out = tmp_path / f"{number}.pt"
        plan = ckptmap.plan(published, "full", names="meta", exclude=(pattern,))
        assert len(plan.steps) == 20 and len(plan.dropped) == 1
        assert set(plan.dropped.values()) == {f"--exclude {pattern}"}
        plan.execute(out)
        assert ckptmap.verify(out, published).ok
    one = tmp_path / "meta.pt"
    ckptmap.convert(published, one, to="full", names="meta")
    both = ckptmap.plan(one, "full", names="torchtune", config_from=str(published),
                        drop=("norm.weight",))  # fmt: skip
    assert both.dropped == {"norm.weight": "--drop norm.weight"} and len(both.steps) == 20
    with pytest.raises(PlanError, match=r"k_proj\.weight is missing"):
        ckptmap.plan(published, "full", names="gpt-fast", exclude=("*layers.0.*k_proj*",))
    three = ("*layers.0.*q_proj*", "*layers.0.*k_proj*", "*layers.0.*v_proj*")
    assert len(ckptmap.plan(published, "full", names="gpt-fast", exclude=three).steps) == 16


def test_include_goes_by_the_names_that_are_written(published: Path, tmp_path: Path) -> None:
    ckptmap.convert(published, tmp_path / "q", to="full", names="meta", include=("*.wq.*",))
    assert len(read(tmp_path / "q")) == 2
    with pytest.raises(PlanError, match=r"no tensor is left .*--include goes by the names in DST"):
        ckptmap.convert(published, tmp_path / "o", to="full", names="meta", include=("*q_proj*",))


def test_one_of_two_sources_can_be_left_behind(tmp_path: Path) -> None:
    state = {"te.norm": torch.ones(3), "local.norm": torch.zeros(3)}
    torch.save(state, tmp_path / "in.pt")
    (tmp_path / "x.toml").write_text(
        'schema = 1\nfamily = "f"\nscheme = "x"\n[[rule]]\nhf = "norm"\nx = "te.norm | local.norm"\n'
    )
    names = str(tmp_path / "x.toml")
    with pytest.raises(PlanError, match="made twice") as caught:
        ckptmap.plan(tmp_path / "in.pt", "full", names=names)
    assert "--exclude" in caught.value.hint
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full", names=names,
                    exclude=("te.norm",))  # fmt: skip
    assert same(read(tmp_path / "out.pt"), {"norm": torch.zeros(3)})
    assert ckptmap.verify(tmp_path / "out.pt", tmp_path / "in.pt").ok


@pytest.mark.parametrize("low_disk", [False, True])
def test_from_the_hub_one_shard_at_a_time(
    low_disk: bool, hub: Hub, llama: LlamaForCausalLM, published: Path, tmp_path: Path
) -> None:
    """Files that rearranged and decoded tensors need are there before they are read."""
    llama.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    hub.add("org/m", tmp_path / "shards")
    for to in ("full", "full-nf4"):
        there, here = tmp_path / f"there-{to}", tmp_path / f"here-{to}"
        ckptmap.convert("hf://org/m", there, to=to, names="meta", low_disk=low_disk)
        ckptmap.convert(tmp_path / "shards", here, to=to, names="meta")
        assert same(read(there), read(here))


# --------------------------------------------------------------------------- quantized sources


@pytest.fixture(scope="module")
def quantized(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(encoding: str) -> Path:
        if encoding not in made:
            made[encoding] = tmp_path_factory.mktemp(encoding) / "ckpt"
            ckptmap.convert(published, made[encoding], to=f"hf-{encoding}")
        return made[encoding]

    return get


@pytest.mark.parametrize("encoding", ["nf4", "int8", "bnb-nf4", "bnb-int8", "ct-int8"])
def test_whole_rows_move_with_their_scales(
    encoding: str, published: Path, quantized: Any, tmp_path: Path
) -> None:
    source, out = quantized(encoding), tmp_path / "out"
    plan = ckptmap.plan(source, "full", names="meta", config_from=str(published))
    rearranged = {s.fqn: s.fidelity for s in plan.steps if s.fidelity != "bytes"}
    assert set(rearranged.values()) == {"exact"}
    assert {s.target for s in plan.steps if "wq" in s.fqn} == {f"{encoding}(bfloat16)"}
    assert not any("decoded" in note for note in plan.notes)
    plan.execute(out)
    assert same(read(out), meta(read(source)))
    assert ckptmap.verify(out, source).ok


@pytest.mark.parametrize(
    ("to", "target", "fidelity"),
    [("full", "bfloat16", "exact"), ("full-nf4", "nf4(bfloat16)", "codes"),
     ("full-int8", "int8(bfloat16)", "requantize")],
)  # fmt: skip
def test_torn_scale_blocks(
    to: str, target: str, fidelity: str, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """q has 1024 blocks of 64, 256 to a factor: 128 rows share one, and heads of 16 rows are torn.
    Decoded, said in the plan; with codes kept where an encoding takes them."""
    wide = LlamaForCausalLM(config(num_attention_heads=32, num_hidden_layers=1)).bfloat16()
    wide.save_pretrained(tmp_path / "hf")
    source, out = tmp_path / "nf4", tmp_path / "out"
    ckptmap.convert(tmp_path / "hf", source, to="hf-nf4")
    plan = ckptmap.plan(source, to, names="meta", config_from=str(tmp_path / "hf"))
    (step,) = (s for s in plan.steps if s.fqn == "layers.0.attention.wq.weight")
    assert (step.target, step.fidelity) == (target, fidelity)
    assert any("decoded, because its rows are rearranged" in note for note in plan.notes)
    plan.execute(out)
    assert ckptmap.verify(out, source).ok
    name, before = step.fqn, meta(read(source))
    found = read(out)[name]
    if fidelity == "exact":
        assert torch.equal(found, before[name])
    if fidelity == "codes":
        with ckptmap.open(out) as mine, ckptmap.open(source) as theirs:
            codes = mine[name].parts["quantized_data"].info
            assert codes.numel == 512 * 64
            packed = mine[name].read_part("quantized_data", Box.whole(codes.shape))
            hub = theirs["model.layers.0.self_attn.q_proj.weight"]
            rows = hub.read_part("quantized_data", Box.whole(codes.shape)).view(512, 64)
        assert torch.equal(packed.view(512, 64), _interleaved(rows))


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, 2, HEAD // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def test_a_fused_matrix_of_quantized_ones(published: Path, quantized: Any, tmp_path: Path) -> None:
    """int8 by rows is put together as it is; NF4, whose mean is one tensor's own, is decoded."""
    for encoding, target in (("int8", "int8(bfloat16)"), ("nf4", "bfloat16")):
        source, out = quantized(encoding), tmp_path / encoding
        plan = ckptmap.plan(source, "full", names="gpt-fast", config_from=str(published))
        fused = [s for s in plan.steps if "wqkv" in s.fqn]
        assert {s.target for s in fused} == {target} and {s.fidelity for s in fused} == {"exact"}
        plan.execute(out)
        expected = translate_names(read(source), "gpt-fast", config())
        assert same(read(out), expected)


@pytest.mark.parametrize("encoding", ["nf4", "int8", "fp16"])
def test_quantized_on_the_way(
    encoding: str, llama: LlamaForCausalLM, published: Path, tmp_path: Path
) -> None:
    """Mapped, then encoded: as if the state dict had been Meta's from the start."""
    torch.save(meta(llama.state_dict()), tmp_path / "meta.pt")
    ckptmap.convert(tmp_path / "meta.pt", tmp_path / "expected", to=f"full-{encoding}")
    ckptmap.convert(published, tmp_path / "out", to=f"full-{encoding}", names="meta")
    with ckptmap.open(tmp_path / "out") as mine, ckptmap.open(tmp_path / "expected") as theirs:
        assert mine.keys() == theirs.keys()
        for fqn in theirs:
            assert mine[fqn].encoding_ == theirs[fqn].encoding_
            for part, stored in theirs[fqn].parts.items():
                box = Box.whole(stored.info.shape)
                assert torch.equal(mine[fqn].read_part(part, box), theirs[fqn].read_part(part, box))
    assert ckptmap.verify(tmp_path / "out", published).ok


# --------------------------------------------------------------------------- values that change


def test_a_value_op_is_a_cast_and_said(tmp_path: Path) -> None:
    """Gemma's norms in Megatron: w + 1, rounded once."""
    model = GemmaForCausalLM(
        GemmaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    intermediate_size=96, vocab_size=128, num_hidden_layers=1)
    ).bfloat16()  # fmt: skip
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(-1, 1, 64))
    model.save_pretrained(tmp_path / "hf")
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'schema = 1\nfamily = "gemma"\nscheme = "mine"\n[dims]\nn = "num_hidden_layers"\n'
        '[[rule]]\nhf = "model.norm.weight :: i"\nmine = "final.weight"\nop = "add 1"\n'
        + "".join(
            f'[[rule]]\nhf = "{key}"\nmine = "mine.{key}"\n'
            for key in model.state_dict()
            if key not in ("model.norm.weight", "lm_head.weight")
        )
    )
    plan = ckptmap.plan(tmp_path / "hf", "full", names=str(mine), names_from="hf")
    (step,) = (s for s in plan.steps if s.fqn == "final.weight")
    assert (step.source, step.fidelity) == ("dense add 1(bfloat16)", "cast")
    assert any("values change: add 1" in note for note in plan.notes)
    plan.execute(tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["final.weight"]
    before = model.model.norm.weight.detach()
    assert torch.equal(found, (before.double() + 1).bfloat16())
    assert ckptmap.verify(tmp_path / "out.pt", tmp_path / "hf").ok
    back = ckptmap.plan(tmp_path / "out.pt", "full", names=str(mine))
    back.execute(tmp_path / "back.pt")
    state = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(state["model.norm.weight"], (found.double() - 1).bfloat16())


# --------------------------------------------------------------------------- optimizer state


def trained(llama: LlamaForCausalLM, path: Path, **asked: Any) -> tuple[State, dict[str, Any]]:
    """A model and its AdamW after two steps, saved as torch users do; weights and state by name."""
    model = LlamaForCausalLM(llama.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **asked)
    for step in range(2):
        tokens = torch.randint(0, 80, (2, 6), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return model.state_dict(), {names[index]: value for index, value in state.items()}


def test_moments_go_as_their_weights_go(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    source, out = tmp_path / "train.pt", tmp_path / "out"
    _, states = trained(llama, source)
    llama.config.save_pretrained(tmp_path)
    ckptmap.convert(source, out, to="fsdp2", names="meta", world_size=2)
    with ckptmap.open(out) as ckpt:
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = meta({key: state[moment] for key, state in states.items()})
            found = {fqn: state[moment].read() for fqn, state in ckpt.optimizer.items()}
            assert same(found, expected)
        assert {float(s["step"].read()) for s in ckpt.optimizer.values()} == {2.0}
        assert ckpt.optimizer_groups[0]["params"][0] == "tok_embeddings.weight"
    assert ckptmap.verify(out, source).ok
    saved = torch.load(source, weights_only=True)
    saved["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(saved, tmp_path / "other.pt")
    lr = "optimizer.param_groups.0.lr"
    assert ckptmap.verify(out, tmp_path / "other.pt").problems == (
        f"{lr}: 0.001, the source has 0.5",
    )
    assert ckptmap.diff(out, tmp_path / "other.pt").settings == {lr: "0.001 and 0.5"}
    assert not ckptmap.diff(out, source).settings


def test_moments_of_fused_weights(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """Three moments become one; their step counts must agree, and are one."""
    source, out = tmp_path / "train.pt", tmp_path / "out.pt"
    _, states = trained(llama, source)
    llama.config.save_pretrained(tmp_path)
    ckptmap.convert(source, out, to="full", names="gpt-fast")
    with ckptmap.open(out) as ckpt:
        found = ckpt.optimizer["layers.1.attention.wqkv.weight"]
        moments = meta({key: state["exp_avg"] for key, state in states.items()})
        parts = [moments[f"layers.1.attention.{name}.weight"] for name in ("wq", "wk", "wv")]
        assert torch.equal(found["exp_avg"].read(), torch.cat(parts))
        assert float(found["step"].read()) == 2.0
        names = ckpt.optimizer_groups[0]["params"]
        assert names.count("layers.1.attention.wqkv.weight") == 1 and len(names) == len(ckpt)


def test_step_counts_that_differ_are_not_put_together(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    source = tmp_path / "train.pt"
    trained(llama, source)
    saved = torch.load(source, weights_only=True)
    names = list(saved["model"])
    at = names.index("model.layers.0.self_attn.k_proj.weight")
    saved["optimizer"]["state"][at]["step"] += 1
    torch.save(saved, source)
    llama.config.save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"step.*differs"):
        ckptmap.convert(source, tmp_path / "out.pt", to="full", names="gpt-fast")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_weights_of_two_groups_are_not_put_together(
    kind: Any, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Nor those of SGD without momentum, which has groups alone."""
    model = LlamaForCausalLM(llama.config)
    names = [name for name, _ in model.named_parameters()]
    late = [p for name, p in model.named_parameters() if "k_proj" in name]
    rest = [p for name, p in model.named_parameters() if "k_proj" not in name]
    optimizer = kind([{"params": rest}, {"params": late, "lr": 0.1}])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt"
    )
    llama.config.save_pretrained(tmp_path)
    order = [[n for n in names if "k_proj" not in n], [n for n in names if "k_proj" in n]]
    with pytest.raises(PlanError, match=r"k_proj.*is not in parameter group 0") as caught:
        ckptmap.plan(tmp_path / "t.pt", "full", names="gpt-fast",
                     param_order=tuple(map(tuple, order)))  # fmt: skip
    assert caught.value.code == "CKM611"
    assert ckptmap.plan(
        tmp_path / "t.pt", "full", names="meta", param_order=tuple(map(tuple, order))
    ).fidelities()


def test_names_alone_import_no_torch(published: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    options = ["--to", "full", "--names", "meta"]
    assert imported_by(["plan", str(published), *options]) == set()
    assert imported_by(["convert", str(published), out, *options, "-q"]) <= {"xxhash"}
    assert imported_by(["inspect", out]) == set()
    assert imported_by(["mappings", "list"]) == set()


# --------------------------------------------------------------------------- many ranks


def test_dtensors_keep_their_mesh() -> None:
    """3 ranks: heads of 10 rows, cut where none of them ends."""
    run_ranks("tests.ranks.translated", 3, timeout=120)


def test_ranks_share_the_work_of_a_translation(published: Path, tmp_path: Path) -> None:
    """The same bytes as by one process, whoever writes which slot."""
    run_ranks("tests.ranks.translating", 2, [str(published), str(tmp_path / "two.pt")], timeout=120)
    ckptmap.convert(published, tmp_path / "one.pt", to="full", names="meta")
    assert (tmp_path / "two.pt").read_bytes() == (tmp_path / "one.pt").read_bytes()


def test_moments_of_fused_weights_beside_weights_that_are_split(tmp_path: Path) -> None:
    """As torchtitan 0.3 saves them: its modules split `wqkv` for their state dict, and optimizers know nothing of it.
    Put together from two conversions; its own trainer is in tests/ranks/torchtitan_trainer.py."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    optimizer.step()
    ckptmap.save(tmp_path / "hf", model, optimizer).wait()
    model.config.save_pretrained(tmp_path / "hf")
    given: dict[str, Any] = {"to": "full", "config_from": tmp_path / "hf" / "config.json"}
    for names in ("torchtitan", "torchtitan-fused"):
        ckptmap.convert(tmp_path / "hf", tmp_path / f"{names}.pt", names=f"llama/{names}", **given)
    split, fused = (
        torch.load(tmp_path / f"{names}.pt") for names in ("torchtitan", "torchtitan-fused")
    )
    torch.save({**split, "optimizer": fused["optimizer"]}, tmp_path / "theirs.pt")
    ckptmap.convert(
        tmp_path / "theirs.pt", tmp_path / "again.pt", names="llama/torchtitan-fused", **given
    )
    again = torch.load(tmp_path / "again.pt")
    wqkv = "layers.1.attention.qkv_linear.wqkv.weight"
    assert wqkv in again["model"] and wqkv in again["optimizer"]["state"]
    assert again["model"].keys() == fused["model"].keys()
    assert all(torch.equal(again["model"][name], fused["model"][name]) for name in again["model"])
    assert again["optimizer"]["state"].keys() == fused["optimizer"]["state"].keys()
    for name, state in again["optimizer"]["state"].items():
        for entry, value in state.items():
            assert torch.equal(value, fused["optimizer"]["state"][name][entry]), (name, entry)
    with pytest.raises(PlanError, match=r"wqkv\.weight: its optimizer state belongs to no weight"):
        ckptmap.convert(tmp_path / "theirs.pt", tmp_path / "no.pt", names="llama/hf", **given)
