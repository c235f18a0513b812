"""The command line: what it prints on which stream, and its exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from ckptmap_cli.typer_app import COMMANDS
from safetensors.torch import load_file, save_file

from ckptmap.error_codes import CODES
from tests.support.paths import ROOT


def weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{i}.mlp.up_proj.weight": torch.randn(64, 64, generator=generator) * scale
        for i in range(3)
    } | {"model.norm.weight": torch.ones(64)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    return path


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """What a trainer saves: weights under a dict, a wrapper, a step, an argparse.Namespace."""
    path = tmp_path / "training.pt"
    model = {f"_orig_mod.{name}": tensor for name, tensor in weights().items()}
    torch.save({"model": model, "step": 7, "args": argparse.Namespace(lr=1e-3)}, path)
    return path


class Done:
    """One command line, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], args: Sequence[object]) -> None:
        capsys.readouterr()
        self.code = main([str(arg) for arg in args])
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; json.loads refuses a second one."""
        found: dict[str, Any] = json.loads(self.out)
        assert found["schema"] == 1
        return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *args: Done(capsys, args)


# ------------------------------------------------------------------ help


def test_help_lists_every_command_and_the_exit_codes(run: Any) -> None:
    done = run("--help")
    assert done.code == 0 and not done.err
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.out, re.MULTILINE)
    assert "130 interrupted" in done.out and "Examples:" in done.out
    assert "..." not in done.out.split("Commands:")[1]  # no summary is cut in 80 columns


def test_help_has_titles_where_there_are_many_options(run: Any) -> None:
    from ckptmap_cli.option_table import GROUPS

    titles = [f"{title}:" for title in GROUPS]
    assert [line for line in run("convert", "--help").out.splitlines() if line in titles] == titles
    assert "Names:" not in run("inspect", "--help").out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_the_parser_knows(run: Any, name: str) -> None:
    done = run(name, "--help")
    assert done.code == 0
    examples = import_module(f"ckptmap_cli.{name}").EXAMPLES
    tail = done.out[done.out.index("Examples:") :].splitlines()
    assert [line.strip() for line in tail[1:]] == list(examples)
    for example in examples:
        words = example.split()
        assert words[0] == "ckptmap" and words[1] in COMMANDS
        options = run(words[1], "--help").out
        for option in (word for word in words if word.startswith("--")):
            assert f"{option} " in options


def test_version(run: Any) -> None:
    from ckptmap import __version__

    for option in ("--version", "-V"):
        done = run(option)
        assert (done.code, done.out) == (0, f"ckptmap {__version__}\n")


def test_help_has_a_short_name(run: Any) -> None:
    for command in ((), ("inspect",), ("convert",)):
        assert run(*command, "-h").out == run(*command, "--help").out


def test_a_wrong_command_is_usage_and_names_a_near_one(run: Any) -> None:
    done = run("inspct", "x")
    assert done.code == 2 and not done.out
    assert "inspect" in done.err


# ------------------------------------------------------------------ inspect


def test_inspect_shows_facts_and_folds_layers(run: Any, training: Path) -> None:
    done = run("inspect", training)
    assert done.code == 0 and not done.err
    assert re.search(r"^  wrappers +_orig_mod\.$", done.out, re.MULTILINE)
    assert re.search(r"^  weights +4 tensors, 12,352 parameters", done.out, re.MULTILINE)
    assert re.search(r"^  extra +step = 7$", done.out, re.MULTILINE)
    assert re.search(r"^  refused +args: .*argparse.Namespace", done.out, re.MULTILINE)
    assert "model.layers.{0..2}.mlp.up_proj.weight" in done.out


def test_inspect_json_has_every_tensor(run: Any, training: Path) -> None:
    document = run("inspect", training, "--json").document
    assert [entry["fqn"] for entry in document["tensors"]] == list(weights())
    assert document["tensors"][0]["key"] == "_orig_mod.model.layers.0.mlp.up_proj.weight"
    assert document["totals"] == {"tensors": 4, "numel": 12352, "nbytes": 49408, "files": 1}
    assert document["dtypes"] == {"float32": 4} and document["extra"] == {"step": 7}


@pytest.mark.parametrize("nested", [True, False])
def test_inspect_says_how_optimizer_state_is_keyed(run: Any, tmp_path: Path, nested: bool) -> None:
    fc = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(fc.parameters())
    fc(torch.ones(8)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    if nested:
        names = ["fc.weight", "fc.bias"]
        state["state"] = {names[index]: states for index, states in state["state"].items()}
    model = {f"fc.{name}": tensor for name, tensor in sorted(fc.state_dict().items())}
    torch.save({"model": model, "optimizer": state}, tmp_path / "run.pt")
    found = run("inspect", tmp_path / "run.pt", "--json").document["optimizer"]
    assert (found["keyed_by"], found["parameters"]) == ("fqn" if nested else "index", 2)
    line = "state of 2 parameters by name: step, exp_avg" if nested else "keyed by index"
    assert line in run("inspect", tmp_path / "run.pt").out
    assert ("exp_avg_sq" in run("inspect", tmp_path / "run.pt", "--keys", "*exp*").out) is nested


def test_inspect_of_an_optimizer_without_state(run: Any, tmp_path: Path) -> None:
    """SGD without momentum, in two groups as Trainer makes them."""
    model = torch.nn.Linear(4, 2)
    groups = [{"params": [model.bias]}, {"params": [model.weight]}]
    state = torch.optim.SGD(groups, lr=0.1).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    done = run("inspect", tmp_path / "c.pt")
    assert done.code == 0 and "state of 0 parameters, keyed by index" in done.out


def test_inspect_outlives_a_malformed_mapping_file(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maps" / "mine").mkdir(parents=True)
    (tmp_path / "maps" / "mine" / "odd.toml").write_text("[detect")
    monkeypatch.setenv("CKPTMAP_MAPPINGS", str(tmp_path / "maps"))
    with pytest.warns(RuntimeWarning, match=r"odd\.toml: .* this mapping file is skipped"):
        done = run("inspect", source)
    assert done.code == 0 and "weights    4 tensors" in done.out


def test_inspect_keys_limits_the_table_only(run: Any, source: Path) -> None:
    done = run("inspect", source, "--keys", "*.1.*")
    assert "model.layers.1.mlp" in done.out and "layers.{0..2}" not in done.out
    assert "4 tensors" in done.out
    assert "no tensor has such a name" in run("inspect", source, "--keys", "nope").out


# ------------------------------------------------------------------ plan and convert


def test_plan_convert_verify_diff(run: Any, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    planned = run("plan", source, "--to", "compiled")
    assert planned.code == 0 and "model.layers.{0..2}.mlp.up_proj.weight" in planned.out
    assert not out.exists()

    done = run("convert", source, out, "--to", "compiled")
    assert done.code == 0, done.err
    assert f"wrote {out}" in done.out
    loaded = torch.load(out, weights_only=True)
    assert {n.removeprefix("_orig_mod.") for n in loaded} == set(weights())

    verified = run("verify", out, "--against", source, "--json")
    assert verified.code == 0 and verified.document["ok"] is True
    assert run("diff", source, out, "--values").code == 0


@pytest.mark.parametrize("to", ["hf", "full", "fsdp2"])
def test_relative_paths(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("convert", source.name, "out", "--to", to).code == 0
    done = run("verify", "out", "--against", source.name)
    assert done.code == 0, done.out
    assert run("diff", "out", source.name, "--values").code == 0


def test_paths_that_are_no_text(run: Any, source: Path, tmp_path: Path) -> None:
    """Linux names files by bytes; these are no UTF-8."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    moved, out = source.rename(folder / source.name), folder / os.fsdecode(b"\xff")
    assert run("convert", moved, out, "--to", "fsdp2").code == 0
    assert run("verify", out, "--against", moved, "--json").document["ok"]


def test_quiet_prints_the_destination_alone(run: Any, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--to", "hf", "--quiet")
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'out'}\n", "")


def test_convert_json_is_one_document(run: Any, source: Path, tmp_path: Path) -> None:
    document = run("convert", source, tmp_path / "out", "--to", "hf", "--json").document
    assert document["tensors"] == 4 and document["fidelity"] == {"bytes": 4}


def test_dry_run_writes_nothing(run: Any, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--to", "hf", "--dry-run")
    assert done.code == 0 and "total: 4 tensors" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


@pytest.mark.parametrize(
    ("to", "dst", "expected"),
    [
        ("hf", "x.safetensors", "names a file, but this setup writes a directory"),
        ("full", "x.safetensors", "names a safetensors file, but this setup writes torch-zip"),
        ("full", "x/", "names a directory, but this setup writes one file"),
        ("full", "", "is an empty path"),
        ("full", "s3://bucket/x", "is not a path on this machine"),
        ("full", "there", "there: exists"),
        ("hf", "there", "is a file, expected a directory or nothing"),
        ("full", "link", "is a symbolic link, never replaced"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_a_dry_run_checks_the_destination_as_a_run_does(
    run: Any, source: Path, tmp_path: Path, to: str, dst: str, expected: str, flags: tuple[str, ...]
) -> None:
    (tmp_path / "there").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    place = f"{tmp_path}/{dst}" if dst and ":" not in dst else dst
    done = run("convert", source, place, "--to", to, *flags)
    assert done.code == 2 and expected in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", source.name, "there"]


def test_a_dry_run_of_what_is_complete_is_no_refusal(
    run: Any, source: Path, tmp_path: Path
) -> None:
    for flags in ((), ("--dry-run",), ()):
        done = run("convert", source, tmp_path / "out", "--to", "hf", *flags)
        assert done.code == 0, done.err
    done = run("convert", source, tmp_path / "out", "--to", "full", "--dry-run")
    assert done.code == 2 and "is a directory, expected a file" in done.err


def test_options_reach_the_plan(run: Any, source: Path, tmp_path: Path) -> None:
    done = run(
        "plan", source, "--to", "fsdp2-bf16", "--world-size", 3, "--include", "*.0.*",
        "--include", "*.1.*", "--exclude", "*.1.*", "--wrap", "ddp,compile", "--root", "app/net",
        "--max-shard-size", "1MiB", "--no-encode", "*norm*", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    options = done.document["options"]
    assert options["world_size"] == 3 and options["include"] == ["*.0.*", "*.1.*"]
    assert options["wrap"] == ["ddp", "compile"] and options["root"] == "app/net"
    assert options["max_shard_nbytes"] == 1 << 20 and options["no_encode"] == ["*norm*"]
    assert [step["fqn"] for step in done.document["steps"]] == [next(iter(weights()))]


def test_unresolved_keys_are_a_no_for_plan_and_a_refusal_for_convert(
    run: Any, training: Path, tmp_path: Path
) -> None:
    planned = run("plan", training, "--to", "full", "--json")
    assert planned.code == 1
    assert [item["key"] for item in planned.document["unresolved"]] == ["args"]

    refused = run("convert", training, tmp_path / "out.pt", "--to", "full")
    assert refused.code == 2 and not refused.out
    assert re.match(r"error\[CKM202\]: args: .*\n  hint: .*--drop args\n$", refused.err)
    assert not (tmp_path / "out.pt").exists()

    done = run("convert", training, tmp_path / "out.pt", "--to", "full", "--drop", "args")
    assert done.code == 0, done.err


def test_a_refusal_names_every_key_that_is_in_the_way(run: Any, tmp_path: Path) -> None:
    strange = {"args": argparse.Namespace(lr=1), "the path": Path("a/b")}
    torch.save({"model": weights(), **strange}, tmp_path / "in.pt")
    refused = run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "full")
    options = refused.err.partition("hint: leave them behind with ")[2]
    assert shlex.split(options) == ["--drop", "args", "--drop", "the path"]
    done = run(
        "convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "full", *shlex.split(options)
    )
    assert done.code == 0, done.err


def test_many_keys_of_one_dict_are_left_out_by_the_dict(run: Any, tmp_path: Path) -> None:
    """One line for each of 40 objects would be a command of 2,000 characters."""
    objects = {f"cb{i}": argparse.Namespace(i=i) for i in range(40)}
    entries = {"callbacks": {**objects, "plain": 1}, "args": argparse.Namespace()}
    torch.save({"model": weights(), **entries}, tmp_path / "in.pt")
    command = ["convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "full"]
    refused = run(*command)
    hint = refused.err.partition("hint: ")[2].strip()
    assert hint == (
        "leave them behind, and what lies beside 40 of them, with --drop callbacks --drop args"
    )
    assert run(*command, *shlex.split(hint.partition(" with ")[2])).code == 0


def test_a_saved_plan_is_run_and_refused_once_the_source_changed(
    run: Any, source: Path, tmp_path: Path
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    saved = run("plan", source, "--to", "hf", "-o", plan)
    assert saved.code == 0 and "--plan" in saved.err
    assert json.loads(plan.read_text())["schema"] == 1
    assert run("convert", source, out, "--plan", plan).code == 0
    assert load_file(out / "model.safetensors").keys() == weights().keys()

    save_file(weights(2.0), source)
    os.utime(source, ns=(1, 1))
    stale = run("convert", source, tmp_path / "other", "--plan", plan)
    assert stale.code == 2 and "error[CKM209]" in stale.err
    assert not (tmp_path / "other").exists()


def test_a_plan_of_another_source_is_refused(
    run: Any, source: Path, training: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    run("plan", source, "--to", "hf", "-o", plan)
    done = run("convert", training, tmp_path / "out", "--plan", plan)
    assert done.code == 2 and "error[CKM209]" in done.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give --to SETUP"),
        (["--plan", "p.json", "--to", "hf"], "--plan holds the options"),
        (["--to", "hf", "--max-memory", "lots"], "'lots' is no size"),
        (["--to", "hf", "--max-memory", "10"], "--max-memory 10: expected 2MiB or more"),
        (["--to", "hf", "--digest", "md5"], "expected one of xxh3, sha256"),
        (["--to", "hf", "--optimizer", "maybe"], "expected one of keep, drop"),
        (["--to", "hf", "--world-size", "0"], "--world-size"),
        (["--to", "hf", "--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors(run: Any, source: Path, tmp_path: Path, args: list[str], said: str) -> None:
    done = run("convert", source, tmp_path / "out", *args)
    assert done.code == 2 and not done.out
    assert said in " ".join(done.err.split())
    document = run("convert", source, tmp_path / "out", *args, "--json").document
    assert document["error"]["code"] == "usage" and said in document["error"]["message"]
    assert re.fullmatch(r"error: [^\n]+\n  hint: ckptmap convert --help\n", done.err)


def test_a_parent_key_drops_what_lies_below_it(run: Any, tmp_path: Path) -> None:
    """As Lightning nests them: one foreign object among the hyper-parameters, tensors in lists."""
    deep = {"loop": {name: {"step": 1} for name in "abcdef"}, "seen": [torch.ones(2)]}
    hyper = {"args": argparse.Namespace(), "h": 8}
    torch.save({"state_dict": weights(), "hp": hyper, **deep}, tmp_path / "src.pt")
    drops = [word for name in ("hp", "loop", "seen") for word in ("--drop", name)]
    done = run("convert", tmp_path / "src.pt", tmp_path / "out.pt", "--to", "full", *drops)
    assert done.code == 0, done.err
    assert "dropped: loop.a.step and 5 more of loop: --drop loop\n" in done.out
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == list(weights())


def test_files_are_named_as_they_were_typed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by where the working directory happens to be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    for args in (["inspect", "run/"], ["inspect", "run/../run"], ["verify", "run"]):
        done = run(*args)
        said = done.out + done.err
        assert f" {args[1].rstrip('/')}/model.safetensors: " in said and str(tmp_path) not in said


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("modle.safetensors", "did you mean {}/model.safetensors?"),
        ("org/name", "for a model on the Hub write hf://org/name"),
    ],
)
def test_a_path_that_is_not_there_is_guessed(
    run: Any, source: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    monkeypatch.chdir(source.parent)
    given = path if "/" in path else source.parent / path
    for args in (["inspect", given], ["merge", source, given, "out"]):
        done = run(*args)
        assert f"hint: {hint.format(source.parent)}\n" in done.err and "[CKM101]" in done.err


def test_a_plan_that_cannot_be_saved_is_refused(run: Any, source: Path) -> None:
    done = run("plan", source, "--to", "hf", "-o", source / "plan.json")
    assert done.code == 2 and "error[CKM304]: " in done.err and "report" not in done.err


def test_a_library_that_is_missing_is_named_before_anything_is_written(
    run: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else 1)
    assert run("convert", source, source.parent / "moved.pt", "--to", "full").code == 0
    before = sorted(source.parent.iterdir())
    done = run("convert", source, source.parent / "out.pt", "--to", "full-bf16")
    assert done.code == 2 and sorted(source.parent.iterdir()) == before
    assert "error[CKM211]: this needs torch, which is not" in done.err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    away = run("push", source, "org/name", "--json")
    assert away.code == 2 and away.document["error"]["hint"] == "pip install huggingface_hub"


def test_diff_shows_what_is_alike_once(run: Any, source: Path, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "norm.safetensors")
    done = run("diff", source, tmp_path / "norm.safetensors")
    assert f"only in {source}: model.layers.{{0..2}}.mlp.up_proj.weight  3x\n" in done.out
    agree = "different: 1 tensor agrees in shape, dtype and encoding; 0 of 1 differ"
    assert f"{agree}, " in done.out and done.out.endswith(f" are only in {source}\n")


def test_diff_tells_of_an_optimizer_that_one_side_lacks_in_one_line(
    run: Any, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in "abc"), torch.nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    named = {f"{name}.{part}": t for name, m in zip("abcd", model, strict=True)
             for part, t in m.state_dict().items()}  # fmt: skip
    torch.save(named, tmp_path / "bare.pt")
    torch.save({"model": named, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    run_pt = tmp_path / "run.pt"
    lines = run("diff", tmp_path / "bare.pt", run_pt).out.splitlines()
    state = "optimizer state of 8 parameters: exp_avg, exp_avg_sq, step (all of it with --json)"
    assert lines[0] == f"only in {run_pt}: {state}"
    assert len(lines) == 2 and lines[1].endswith(f"24 are only in {run_pt}")


@pytest.mark.parametrize("option", ["include", "exclude", "encode", "no-encode"])
def test_a_pattern_of_nothing_is_refused(run: Any, source: Path, option: str) -> None:
    more = ["--include", "*"] if option == "include" else []
    done = run("plan", source, "--to", "full-nf4", f"--{option}", "modl.*", *more)
    assert done.code == 2 and f"error[CKM206]: --{option} 'modl.*': nothing in " in done.err
    named = run("plan", source, "--to", "full-nf4", f"--{option}", "*.2.mlp.up_proj.weight")
    assert named.code == 0 and "is named so" not in named.err


def test_one_of_several_models_is_verified_and_compared(run: Any, tmp_path: Path) -> None:
    """What opens only by an option of convert is opened by verify, diff and inspect likewise."""
    both, out = tmp_path / "gan.pt", tmp_path / "g"
    torch.save({"G": weights(), "D": weights(2.0)}, both)
    named = ("--source-root", "G")
    assert run("convert", both, out, "--to", "hf", *named).code == 0
    assert run("verify", out, "--against", both).code == 2
    assert run("verify", out, "--against", both, *named).code == 0
    assert run("verify", out, "--against", both, "--source-root", "D").code == 1
    assert run("diff", both, out, "--values", *named).code == 0
    assert run("inspect", both, *named, "--json").document["tensors"]
    useless = run("verify", out, *named)
    assert useless.code == 2 and "--against" in useless.err


def test_an_unknown_setup_names_a_near_one(run: Any, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--to", "fdsp2-nf4")
    assert done.code == 2
    assert re.search(r"error\[CKM201\].*\n  hint: did you mean --to fsdp2-nf4\?", done.err)


# ------------------------------------------------------------------ verify, diff, explain, doctor


def test_verify_says_no(run: Any, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "--to", "hf").code == 0
    assert run("verify", out).code == 0
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("verify", out)
    assert done.code == 1 and "NOT ok" in done.out and not done.err


def test_verify_without_a_manifest_says_no(run: Any, source: Path) -> None:
    done = run("verify", source)
    assert done.code == 1 and "error[CKM403]" in done.err


def test_diff_says_no(run: Any, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file(weights(2.0), other)
    assert run("diff", source, other).code == 0
    done = run("diff", source, other, "--values", "--json")
    assert done.code == 1 and len(done.document["changed"]) == 3


def test_explain(run: Any) -> None:
    done = run("explain", "ckm202")
    assert done.code == 0 and done.out.startswith("CKM202: ") and "Next: " in done.out
    assert run("explain", "301").out.startswith("CKM301: ")
    assert run("explain", "--json").document["codes"].keys() == CODES.keys()
    unknown = run("explain", "CKM999")
    assert unknown.code == 2 and "no error code" in " ".join(unknown.err.split())


def test_doctor(run: Any) -> None:
    done = run("doctor", "--json")
    assert done.code == 0, done.out
    assert done.document["packages"]["torch"] == torch.__version__
    assert done.document["devices"][0] == "cpu"
    assert done.document["fixes"] and not any(f["problem"] for f in done.document["fixes"])
    assert re.search(r"^  torch +\d", run("doctor").out, re.MULTILINE)


# ------------------------------------------------------------------ what goes wrong


def test_an_expected_error_is_a_line_and_a_hint(run: Any, tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "nope.pt")
    assert done.code == 2 and not done.out
    assert re.match(r"error\[CKM101\]: [^\n]*nope\.pt[^\n]*\n  hint: [^\n]+\n$", done.err)
    error = run("inspect", tmp_path / "nope.pt", "--json").document["error"]
    assert error["code"] == "CKM101" and error["hint"]


def test_an_unexpected_error_is_a_line_too(
    run: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("ckptmap.open", broken)
    done = run("inspect", source)
    assert done.code == 3 and not done.out
    assert re.match(r"error: KeyError: 'a defect'\n  hint: .*CKPTMAP_DEBUG=1 ckptmap", done.err)
    assert run("inspect", source, "--json").document["error"]["code"] == "internal"
    monkeypatch.setenv("CKPTMAP_DEBUG", "1")
    assert "Traceback" in run("inspect", source).err


STUCK = """
import sys, time
from ckptmap.operations import convert
from ckptmap_cli.main import main
def stuck(*args, **kwargs):
    print("working", flush=True)
    time.sleep(60)
convert.run = stuck
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_says_how_to_continue(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    args = ["convert", str(source), str(tmp_path / "out put"), "--to", "hf"]
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.startswith("error[CKM307]: interrupted\n  hint: the same command continues it: ")
    assert f"ckptmap convert {source} '{tmp_path / 'out put'}' --to hf" in err


def test_nohup_is_heeded(source: Path, tmp_path: Path) -> None:
    """A process that was told to outlive its terminal does."""
    args = ["convert", str(source), str(tmp_path / "out"), "--to", "hf"]
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("60", "0.3"), *args], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGHUP)
        assert "-> hf" in process.communicate(timeout=30)[0] and process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_a_reader_that_went_away_is_no_error(source: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "ckptmap", "inspect", str(source), "--json"],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_failure(closed: str, source: Path, tmp_path: Path) -> None:
    for args in (f"convert {source} {tmp_path / 'out'} --to full", f"inspect {source}"):
        command = f"{sys.executable} -m ckptmap {args} {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command
    assert (tmp_path / "out").exists()
