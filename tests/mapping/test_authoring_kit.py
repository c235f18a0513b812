"""The tools for authors of mapping files: the kit, the pytest plugin, `ckptmap mappings`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import VARIABLE, available, find
from ckptmap.mapping.mapping_file import load_scheme
from ckptmap.mapping.translate_state_dict import translate_names
from ckptmap.operations.draft_mapping import draft
from ckptmap.testing import MappingKit
from ckptmap.testing.mappings import DTYPES, iota, read_table, table, write_table
from tests.corpus.ranks import RankOutput
from tests.mapping.test_convert import write
from tests.support.forked import run_forked
from tests.support.mapping_state import config_of, hub_state, state_of
from tests.support.paths import EXAMPLES

State = dict[str, torch.Tensor]

EXAMPLE = EXAMPLES / "mapping_tests"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The example, to be spoilt."""
    shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return tmp_path / "mine" / "trainer.toml"


def spoil(file: Path, before: str, after: str) -> Path:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    return file


# --------------------------------------------------------------------------- the kit


@pytest.mark.parametrize("entry", available(), ids=lambda entry: entry.title)
def test_every_shipped_file_passes(entry: object) -> None:
    """Proof, and there and back in every dtype, on a tiny model with extents all different."""
    done = MappingKit(entry.path).run()  # type: ignore[attr-defined]
    assert done[0] == "proof" and len(done) == 1 + len(DTYPES)


def test_the_example_passes(mine: Path) -> None:
    done = MappingKit(mine).run()
    assert "golden" in done and [name for name in done if name.startswith("refuses")]


def test_a_wrong_order_of_axes_fails_the_golden_table(mine: Path) -> None:
    """A bijection all the same: only the table can tell."""
    spoil(mine, "(s two r) i @ s[0:h]", "(s r two) i @ s[0:h]")
    kit = MappingKit(mine)
    kit.check("proof")
    kit.check("round_trip", "bfloat16")
    with pytest.raises(AssertionError, match=r"blocks\.0\.attn\.qkv\.weight: made .* has float32"):
        kit.check("golden")


def test_a_golden_table_that_is_another_models(mine: Path) -> None:
    rows = read_table(mine.with_suffix(".tsv"))
    row = rows.pop("norm.weight")
    write_table(mine.with_suffix(".tsv"), rows, "a test")
    with pytest.raises(AssertionError, match=r"norm\.weight: is made and is not in trainer\.tsv"):
        MappingKit(mine).check("golden")
    write_table(mine.with_suffix(".tsv"), {**rows, "norm.weight": row, "more": row}, "a test")
    with pytest.raises(AssertionError, match=r"more: is in trainer\.tsv and is not made"):
        MappingKit(mine).check("golden")
    mine.with_suffix(".tsv").write_text("key\tshape\n")
    with pytest.raises(PlanError, match="is not a golden table") as caught:
        MappingKit(mine).check("golden")
    assert caught.value.code == "CKM616"


def test_what_should_be_refused_and_is_not(mine: Path) -> None:
    refused = mine.with_suffix(".refused.toml")
    refused.write_text('[[refused]]\nwhy = "nothing is wrong"\ncode = "CKM607"\n')
    with pytest.raises(AssertionError, match="nothing is wrong: was mapped, expected CKM607"):
        MappingKit(mine).check("refuses", "0")
    refused.write_text('[[refused]]\nwithout = ["norm"]\ncode = "CKM607"\n')
    with pytest.raises(AssertionError, match="norm is not there to be left out"):
        MappingKit(mine).check("refuses", "0")
    refused.write_text('[[refused]]\nwithout = ["model.norm.weight"]\ncode = "CKM601"\n')
    with pytest.raises(AssertionError, match=r"CKM607: .*, expected CKM601"):
        MappingKit(mine).check("refuses", "0")
    refused.write_text('[[refused]]\nwhy = "no code"\n')
    with pytest.raises(PlanError, match=r"is not a list of \[\[refused\]\]") as caught:
        list(MappingKit(mine).checks())
    assert caught.value.code == "CKM616"


def test_a_round_trip_that_loses_something(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: an engine that moved one element is seen, and told where."""
    kit = MappingKit(mine)
    back = kit.back

    def wrong(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {key: tensor.clone() for key, tensor in back(state).items()}
        found["model.norm.weight"][:2] = found["model.norm.weight"][:2].flip(0).clone()
        return found

    monkeypatch.setattr(kit, "back", wrong)
    with pytest.raises(
        AssertionError, match=r"model\.norm\.weight: element 0 of 12 is .*, expected"
    ):
        kit.check("round_trip", "float32")


def test_an_operation_that_states_a_dtype(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor comes back in that dtype and no other; the tensors beside it in their own."""
    rule = 'hf      = "model.norm.weight :: i"'
    kit = MappingKit(spoil(mine, rule, f'op = "add 1 float32"\n{rule}'))
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        kit.check("round_trip", dtype)
    back = kit.back

    def narrowed(state: State) -> State:
        return {key: tensor.bfloat16() for key, tensor in back(state).items()}

    monkeypatch.setattr(kit, "back", narrowed)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight: .*expected float32"):
        kit.check("round_trip", "bfloat16")


def test_iota_counts_over_the_whole_dict() -> None:
    kit = MappingKit(EXAMPLE / "trainer.toml")
    state = kit.source("int64")
    values = torch.cat([state[key].reshape(-1) for key in sorted(state)])
    assert torch.equal(values, torch.arange(len(values)))
    for dtype in DTYPES:
        found = kit.source(dtype)
        assert {str(t.dtype) for t in found.values()} == {f"torch.{dtype}"}
        assert any(bool(t.reshape(-1).view(torch.uint8).any()) for t in found.values())
    assert table(iota({}), {}) == {}


# --------------------------------------------------------------------------- the plugin


def run_pytest(folder: Path) -> RankOutput:
    options = ["-v", "--color=no", "-p", "no:cacheprovider", "-p", "ckptmap.pytest_plugin"]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run_forked("pytest", *options, cwd=folder, env=alone)


def test_mapping_files_are_collected_as_tests(mine: Path) -> None:
    """The example as a user has it: two lines of pytest.ini."""
    assert len((mine.parent / "pytest.ini").read_text().splitlines()) <= 3
    done = run_pytest(mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"trainer\.toml::(\S+) PASSED", done.stdout)
    assert names[0] == "proof" and "golden" in names and "refuses[4]" in names
    assert {f"round_trip[{dtype}]" for dtype in DTYPES} <= set(names)


def test_a_failure_is_one_line(mine: Path) -> None:
    spoil(mine, "(s two r) i @ s[0:h]", "(s r two) i @ s[0:h]")
    done = run_pytest(mine.parent)
    assert done.returncode == 1
    assert "1 failed" in done.stdout and "Traceback" not in done.stdout
    assert "trainer.toml: golden: blocks.0.attn.qkv.weight: made float32" in done.stdout


def test_without_the_setting_nothing_is_collected(mine: Path) -> None:
    (mine.parent / "pytest.ini").write_text("[pytest]\n")
    done = run_pytest(mine.parent)
    assert done.returncode == 5 and "collected 0 items" in done.stdout


# --------------------------------------------------------------------------- where files are found


def test_files_of_ones_own_go_first(
    mine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    (own / "llama").mkdir(parents=True)
    shutil.copy(mine, own / "llama" / "trainer.toml")
    shipped = Path(find("llama/meta")[0].path)
    shutil.copy(shipped, own / "llama" / "meta.toml")
    assert "trainer" not in {entry.name for entry in available()}
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'none'}:{own}")
    assert find("trainer")[0].path == str(own / "llama" / "trainer.toml")
    assert find("llama/meta")[0].path == str(own / "llama" / "meta.toml")


def test_the_latest_era_is_meant_unless_said() -> None:
    eras = [entry.era for entry in find("llama/torchtitan")]
    assert eras == sorted(eras, reverse=True) and len(eras) > 1
    assert [entry.era for entry in find(f"llama/torchtitan@{eras[-1]}")] == [eras[-1]]
    with pytest.raises(PlanError, match="is not a known scheme") as caught:
        find("llama/torchtitan@1999-01")
    assert caught.value.code == "CKM603"


def test_a_broken_file_on_the_path_is_named_and_skipped(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a head that is no TOML nor a rule that contradicts itself ends a run that needs neither;
    the refusals beside a file, for its tests, are no mapping file."""
    folder = tmp_path / "maps" / "llama"
    folder.mkdir(parents=True)
    for name in ("trainer.toml", "trainer.refused.toml"):
        shutil.copy(mine.with_name(name), folder)
    (folder / "x.toml").write_text("schema = ")
    wrong = 'schema = 1\nfamily = "llama"\nscheme = "y"\n[[rule]]\nhf = "a :: i j"\ny = "a :: i"\n'
    (folder / "y.toml").write_text(wrong)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "maps"))
    with pytest.warns(RuntimeWarning, match="this mapping file is skipped") as told:
        found = {entry.title for entry in available()}
    assert "llama/trainer" in found and not {"llama/x", "llama/y"} & found
    files = [str(warning.message).partition(":")[0] for warning in told]
    assert files == [str(folder / "x.toml"), str(folder / "y.toml")]
    with pytest.raises(PlanError, match=r"x\.toml: is not valid TOML") as caught:
        load_scheme(folder / "x.toml")
    assert caught.value.code == "CKM601"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("mta", "meta"), ("Meta", "meta"), ("hf_memory", "hf-memory"), ("lama/meta", "llama/meta")],
)
def test_a_misspelt_scheme_is_answered_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(PlanError, match="is not a known scheme") as caught:
        find(name)
    assert caught.value.hint.startswith(f"did you mean {meant}")


def test_a_file_without_its_suffix(mine: Path) -> None:
    file = mine.rename(mine.with_suffix(".txt"))
    with pytest.raises(PlanError, match="is not a known scheme") as caught:
        find(str(file))
    assert "ends with .toml" in caught.value.hint


# --------------------------------------------------------------------------- the command line


def cli(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    assert main(["mappings", *map(str, args)]) == code
    return capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    text = cli(capsys, "list")
    assert re.search(r"^llama/meta +\S", text, re.M)
    document = json.loads(cli(capsys, "list", "--json"))
    assert {entry["scheme"] for entry in document["mappings"]} == {e.title for e in available()}
    assert re.search(r"^llama/torchtitan@2025-07 .*\(= llama/meta\)$", text, re.M)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("phi3", {"phi3/gguf", "phi3/hf", "phi3/megatron", "phi3/torchtune"}),
        ("gemma3_text", {"gemma3_text/gguf", "gemma3_text/hf", "gemma3_text/megatron"}),
        ("meta", {"llama/meta", "mixtral/meta"}),
        ("mixtral/gpt-fast", {"mixtral/gpt-fast"}),
        ("llama/torchtitan@2026-04a", {"llama/torchtitan@2026-04a"}),
    ],
)
def test_list_of_a_part(what: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(cli(capsys, "list", what, "--json"))
    assert {entry["scheme"] for entry in document["mappings"]} == expected
    lines = cli(capsys, "list", what).splitlines()
    assert {line.split()[0] for line in lines} == expected


def test_list_of_a_model_type_is_that_of_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    """Less the files that are not for it: Mistral's go with Llama's."""
    found = {line.split()[0] for line in cli(capsys, "list", "mistral").splitlines()}
    assert found == {e.title for e in available() if "mistral" in e.models}
    assert {title.partition("/")[0] for title in found} == {"llama"}


def test_list_of_nothing_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("lama", "llama/mata"):
        assert main(["mappings", "list", what]) == 2
        found = capsys.readouterr()
        assert not found.out and len(found.err.strip().splitlines()) == 2
        assert f"error[CKM603]: {what!r} is not a known family, model type or scheme" in found.err
        assert "bloom, deepseek_v3, falcon" in found.err


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'scheme = "meta"' in cli(capsys, "show", "llama/meta")
    rules = json.loads(cli(capsys, "show", "llama/meta", "--json"))["rules"]
    assert {
        "hf": ["model.norm.weight :: i"],
        "other": ["norm.weight :: i"],
        "rename": True,
    } in rules


def test_check(capsys: pytest.CaptureFixture[str], mine: Path) -> None:
    assert cli(capsys, "check", mine).startswith("ok: llama/trainer: 9 rules, 7 of them renames")
    spoil(mine, "s[h:h+g]", "s[h:h+2*g]")
    assert main(["mappings", "check", str(mine)]) == 2
    found = capsys.readouterr()
    assert not found.out and "error[CKM602]" in found.err and "rule 2" in found.err


def test_test(capsys: pytest.CaptureFixture[str], mine: Path) -> None:
    assert "17 of 17 passed" in cli(capsys, "test", mine)
    spoil(mine, "(s two r) i @ s[0:h]", "(s r two) i @ s[0:h]")
    text = cli(capsys, "test", mine, code=1)
    assert "FAILED golden  blocks.0.attn.qkv.weight" in text and "16 of 17 passed" in text
    config = mine.parent / "other.json"
    config.write_text(json.dumps({**config_of("llama"), "hidden_size": 3}))
    document = json.loads(cli(capsys, "test", mine, "--config", config, "--json", code=1))
    assert [check["check"] for check in document["checks"] if check["ok"]][:2] == [
        "proof", "round_trip[float32]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [(("show",), 2, "give a scheme"), (("new",), 2, "give --from SRC and --to DST"),
     (("find",), 2, "expected one of list, show"), (("show", "meta"), 2, "could be llama/meta, mixtral")],
)  # fmt: skip
def test_usage(
    args: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mappings", *args]) == code
    assert message in capsys.readouterr().err


def test_convert_plan_and_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path / "hf", hub_state("llama"), "llama")
    out = str(tmp_path / "out.pt")
    assert (
        main(["convert", str(tmp_path / "hf"), out, "--to", "full", "--names", "meta", "-q"]) == 0
    )
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    assert re.search(
        r"^ +names +llama/meta \(= torchtitan@2025-07\)$", capsys.readouterr().out, re.M
    )
    assert main(["inspect", out, "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["names"]
    assert names == ["llama/meta", "llama/torchtitan@2025-07"]
    assert main(["inspect", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["llama/hf"]
    options = ["--to", "full", "--names", "auto", "--config-from", str(tmp_path / "hf")]
    assert main(["plan", out, *options]) == 0
    text = capsys.readouterr().out
    assert "names: llama/meta -> hf" in text and "exact" in text
    assert main(["plan", out, *options, "--names-from", "llama/torchtune"]) == 2
    assert "error[CKM607]" in capsys.readouterr().err


# --------------------------------------------------------------------------- a first draft


def drafted(tmp_path: Path, hub: dict[str, torch.Tensor], other: dict[str, torch.Tensor],
            values: bool) -> tuple[Path, object]:  # fmt: skip
    for name, state in (("hub", hub), ("other", other)):
        save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / f"{name}.safetensors")
    found = draft(tmp_path / "hub.safetensors", tmp_path / "other.safetensors", values=values)
    file = tmp_path / "draft.toml"
    file.write_text(str(found))
    return file, found


@pytest.mark.parametrize(("model", "scheme"), [("llama", "meta"), ("mixtral", "hf-memory")])
def test_a_draft_by_contents_maps_as_the_shipped_file(
    model: str, scheme: str, tmp_path: Path
) -> None:
    """Renames and rotary rows of Llama, and the joined and stacked experts of Mixtral, are found whole."""
    hub, other = hub_state(model), state_of(model, scheme)
    file, found = drafted(tmp_path, hub, other, values=True)
    assert load_scheme(file).rules
    assert found.guessed == 0 and not found.left  # type: ignore[attr-defined]
    made = translate_names(hub, str(file), config_of(model), source="hf", partial=True)
    assert made.keys() == other.keys()
    assert all(torch.equal(made[key], other[key]) for key in made)


def test_stacked_transposed_and_joined_tensors_are_drafted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hub = {f"e.{i}.w": torch.randn(3, 5) for i in range(4)}
    hub |= {"a.q": torch.randn(6, 5), "a.k": torch.randn(2, 5), "a.v": torch.randn(2, 5)}
    hub |= {"c": torch.randn(4, 7)}
    other = {"experts": torch.stack([hub[f"e.{i}.w"].t() for i in range(4)])}
    other |= {"a.qkv": torch.cat([hub["a.q"], hub["a.k"], hub["a.v"]]), "conv": hub["c"].t()}
    file, found = drafted(tmp_path, hub, other, values=True)
    assert found.summary.startswith("3 rules, 0 of them guessed")  # type: ignore[attr-defined]
    made = translate_names(hub, str(file), source="hf", partial=True)
    assert all(torch.equal(made[key], other[key]) for key in other)


@pytest.mark.parametrize("values", [True, False])
def test_gate_and_up_of_experts_that_are_joined_and_stacked_are_drafted(
    tmp_path: Path, values: bool
) -> None:
    """Mixtral on disk and in memory: the draft maps as the shipped file does."""
    hub, other = hub_state("mixtral"), state_of("mixtral", "hf-memory")
    file, found = drafted(tmp_path, hub, other, values=values)
    assert not found.left and not found.right
    text = file.read_text()
    assert "experts.{e}.w1.weight :: m i @ two[0]" in text and "gate_up_proj :: e (two m) i" in text
    if values:
        mapped = translate_names(hub, str(file), config_of("mixtral"))
        assert all(torch.equal(mapped[name], other[name]) for name in other)


def test_a_draft_by_shapes_says_that_it_guesses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "hf", hub_state("llama"), "llama")
    write(tmp_path / "tune", state_of("llama", "torchtune"), "llama")
    text = cli(capsys, "new", "--from", tmp_path / "hf", "--to", tmp_path / "tune")
    assert text.count("# a guess: shapes alone") == text.count("[[rule]]") > 5
    document = json.loads(
        cli(capsys, "new", "--from", tmp_path / "hf", "--to", tmp_path / "tune", "--json")
    )
    assert document["guessed"] == document["rules"] and document["text"].strip() == text.strip()


def test_equal_contents_are_a_guess_too(tmp_path: Path) -> None:
    """Norms of a new model are all ones."""
    hub = {"norm.a": torch.ones(3), "norm.b": torch.ones(3), "w": torch.randn(3)}
    other = {"n.b": torch.ones(3), "n.a": torch.ones(3), "v": hub["w"]}
    file, found = drafted(tmp_path, hub, other, values=True)
    assert found.guessed == 2  # type: ignore[attr-defined]
    assert 'hf   = "norm.a"\nmine = "n.a"' in file.read_text()


@pytest.mark.parametrize(
    ("hub", "other", "values", "problem"),
    [
        ({"a": torch.ones(3)}, {"b": torch.ones(4)}, False, "no two tensors have the same shape"),
        ({"a.w": torch.ones(3)}, {"b.w": torch.zeros(3)}, True, "a.w and b.w have the shape"),
        (
            {"a.0.w": torch.ones(3), "a.1.w": torch.ones(3)}, {"b.w": torch.ones(3)}, False,
            "their numbers differ: 2 and 1 tensors",
        ),
    ],
)  # fmt: skip
def test_nothing_to_draft(
    hub: State, other: State, values: bool, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=problem) as caught:
        drafted(tmp_path, hub, other, values=values)
    assert caught.value.code == "CKM615"


def test_a_draft_is_for_the_model_of_the_config_and_works_in_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, by its name below CKPTMAP_MAPPINGS, and recognized: in and out of its names."""
    hub = tmp_path / "hub"
    write(hub, hub_state("llama"), "llama")
    own = {key.replace("model.layers", "trunk"): t for key, t in hub_state("llama").items()}
    torch.save(own, tmp_path / "own.pt")
    text = str(draft(hub, tmp_path / "own.pt", values=True))
    assert 'models = ["llama"]' in text and 'n = "num_hidden_layers"' in text
    assert '[detect]\nall = ["trunk.{n}.' in text
    file = tmp_path / "maps/mine/mine.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    ways = [
        {"names": str(file)},
        {"names_from": str(file)},
        {"names_from": str(file), "names": "hf"},
    ]
    on_path = [{"names": "hf"}, {"names_from": "mine"}, {"names_from": "mine/mine", "names": "hf"}]
    for number, names in enumerate([*ways, *on_path]):
        if names in on_path:
            monkeypatch.setenv(VARIABLE, str(tmp_path / "maps"))
        out = tmp_path / f"out{number}"
        ckptmap.convert(tmp_path / "own.pt", out, to="hf", config_from=hub, **names)  # type: ignore[arg-type]
        assert ckptmap.diff(out, hub, values=True).equal, names
    ckptmap.convert(hub, tmp_path / "back.pt", to="full", names="mine")
    assert ckptmap.diff(tmp_path / "back.pt", tmp_path / "own.pt", values=True).equal


def test_a_draft_can_be_tested_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The number of layers is in it: without keys nothing else tells how many to make."""
    file, _ = drafted(tmp_path, hub_state("llama"), state_of("llama", "meta"), values=True)
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    text = cli(capsys, "test", file, "--config", tmp_path / "config.json")
    assert "11 of 11 passed" in text
    file.write_text(re.sub(r"\nn = .*", "", file.read_text()))
    with pytest.raises(PlanError, match=r"needs a dim 'n', which the mapping file does not define"):
        MappingKit(file, config_of("llama")).check("round_trip", "float32")
