"""Mistakes at the command line: one line names the mistake and a next step that works."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import SourceError

Run = Callable[..., tuple[int, str, str]]
WEIGHTS = {"layers.0.weight": torch.randn(64, 64), "layers.1.weight": torch.randn(64, 64)}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command line in `tmp_path`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# ------------------------------------------------------------------ several adapters


@pytest.fixture(scope="module")
def peft_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ and adapters/first, adapters/second, as save_pretrained of a model with two makes them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("peft")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "base")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), "first")
    wrapped.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    wrapped.save_pretrained(str(folder / "adapters"))
    return folder


def test_a_directory_of_several_adapters(peft_run: Path, run: Run, tmp_path: Path) -> None:
    adapters, base = peft_run / "adapters", peft_run / "base"
    code, _, err = run("inspect", adapters)
    assert code == 2 and "holds peft adapters without their base weights: first, second" in err
    command = err.partition("ckptmap ")[2].strip().replace("BASE", str(base))
    assert run(*shlex.split(command.replace("DST", str(tmp_path / "out"))))[0] == 0
    code, _, err = run("merge", base, adapters, "other")
    assert code == 2 and f"hint: name one of them: {adapters / 'second'}" in err
    (tmp_path / "runs").mkdir()
    os.symlink(adapters / "first", tmp_path / "runs/checkpoint-10")
    code, _, err = run("convert", "runs", "other", "--to", "hf")
    assert code == 2 and "ckptmap merge BASE runs/checkpoint-10 DST" in err


def test_adapters_below_the_one_that_is_merged(run: Run, peft_run: Path, tmp_path: Path) -> None:
    """save_pretrained puts the adapter "default" in the directory itself, others in folders of it."""
    shutil.copytree(peft_run / "adapters/first", tmp_path / "adapter")
    shutil.copytree(peft_run / "adapters/second", tmp_path / "adapter/second")
    code, out, _ = run("merge", peft_run / "base", "adapter", "out")
    assert code == 0 and "note: adapter/second: is another adapter, not merged\n" in out


# ------------------------------------------------------------------ what goes along, or does not

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_pointers_beside_weights(run: Run, peft_run: Path, tmp_path: Path) -> None:
    shutil.copytree(peft_run / "base", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text(POINTER)
    code, out, _ = run("convert", "hf", "out", "--to", "hf")
    assert code == 0 and "note: tokenizer.json: is a Git LFS pointer, not the file itself" in out
    (tmp_path / "hf/config.json").write_text(POINTER)
    code, _, err = run("convert", "hf", "other", "--to", "hf")
    assert code == 2 and err.startswith("error[CKM102]: hf/config.json: is a Git LFS pointer")


def test_a_config_that_has_no_place(run: Run, source: Path, peft_run: Path) -> None:
    base = peft_run / "base"
    code, out, _ = run("convert", source, "out.pt", "--to", "full", "--config-from", base)
    assert code == 0
    assert f"note: --config-from {base}: is not carried over, full holds no config.json" in out
    code, out, _ = run("convert", base, "out", "--to", "hf", "--config-from", base)
    assert code == 0 and "--config-from" not in out


def test_commands_in_hints_can_be_pasted(run: Run, source: Path, tmp_path: Path) -> None:
    for name in ("check 1", "check 2"):
        (tmp_path / "two runs" / name).mkdir(parents=True)
        shutil.copy(source, tmp_path / "two runs" / name)
    code, _, err = run("plan", "two runs", "--to", "hf")
    assert code == 2 and "give the path of one; the highest number has 'two runs/check 2'\n" in err
    for name in ("actor", "critic"):
        (tmp_path / "two models" / name).mkdir(parents=True)
        shutil.copy(source, tmp_path / "two models" / name)
    code, _, err = run("plan", "two models", "--to", "hf")
    assert code == 2 and "give the path of one: 'two models/actor'\n" in err
    (tmp_path / "tune").mkdir()
    for name in ("hf_model_0001_0.pt", "hf_model_0002_0.pt", "recipe_state.pt"):
        shutil.copy(source, tmp_path / "tune" / name)
    code, _, err = run("plan", "tune", "--to", "hf")
    assert code == 2 and "parts of one model, as torchtune names them" in err
    assert "name them as shards: pytorch_model-00001-of-00002.bin" in err
    _, _, err = run("plan", "two runs/check 1", "--to", "hf", "-o", "my plan.json")
    command = shlex.split(err.partition("run it with: ckptmap ")[2].replace("DST", "out"))
    assert run(*command)[0] == 0


# ------------------------------------------------------------------ a library that is broken


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("from ._xxhash import xxh3_64", "No module named 'xxhash._xxhash'"),
        ("raise ImportError('libfoo.so: cannot open')", "libfoo.so: cannot open"),
        ("import ctypes; ctypes.CDLL('libfoo.so.9')", "libfoo.so.9: cannot open"),
    ],
)
def test_a_library_that_cannot_be_imported(
    source: Path, tmp_path: Path, init: str, said: str
) -> None:
    """An installation that was cut off, or whose shared libraries are not found."""
    (tmp_path / "broken/xxhash").mkdir(parents=True)
    (tmp_path / "broken/xxhash/__init__.py").write_text(init)
    done = subprocess.run(
        [sys.executable, "-m", "ckptmap", "convert", source, "out.pt", "--to", "full"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3 and "please report" not in done.stderr
    assert f"error[CKM211]: xxhash is installed here and cannot be imported: {said}" in done.stderr


def test_a_path_that_is_no_text_can_be_pasted(run: Run, tmp_path: Path) -> None:
    """Every command that a hint repeats is one that a shell reads back."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    torch.save({"w": torch.ones(2)}, folder / "m.pt")
    name = f"{folder.name}/m.pt"
    code, out, _ = run("convert", name, "out", "--to", "hf")
    assert code == 0 and "ckptmap convert $'\\xff/m.pt' out --to hf --config-from MODEL" in out
    code, out, err = run("plan", name, "--to", "hf", "-o", "plan.json")
    assert code == 0 and "ckptmap convert --plan plan.json $'\\xff/m.pt' DST" in out + err


def test_a_name_of_many_characters_is_cut_in_the_middle(run: Run, tmp_path: Path) -> None:
    """Its length is said; the hint has it whole, to be pasted."""
    name = "a" * 5000 + ".weight"
    torch.save({name: torch.zeros(2).to_sparse(), "b": torch.zeros(2)}, tmp_path / "long.pt")
    code, _, err = run("convert", "long.pt", "out", "--to", "hf")
    message, _, hint = err.partition("\n")
    assert code == 2 and len(message) < 600 and "characters)..." in message and name in hint


# ------------------------------------------------------------------ two saves in one directory


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


def test_an_index_that_a_later_save_left_behind(run: Run, tmp_path: Path) -> None:
    """transformers removes the shards and not the index, and loads the one file."""
    llama(0).save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    llama(1).save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()
    code, out, _ = run("convert", "hf", "out.pt", "--to", "full")
    assert code == 0 and "not read, because all shards that it lists are gone" in out
    assert torch.equal(torch.load("out.pt")["lm_head.weight"], llama(1).lm_head.weight)


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model.safetensors", "pytorch_model.bin"])
def test_saves_of_other_libraries_beside_an_index(run: Run, tmp_path: Path, stem: str) -> None:
    """The one file is read where all shards of the index are gone, and neither is where they are not."""
    (tmp_path / "saved").mkdir()
    name, suffix = stem.rsplit(".", 1)
    write = save_file if suffix == "safetensors" else torch.save
    write({"a.weight": torch.ones(2)}, tmp_path / "saved" / stem)
    shard = f"{name}-00001-of-00001.{suffix}"
    index = {"metadata": {}, "weight_map": {"a.weight": shard}}
    (tmp_path / "saved" / f"{stem}.index.json").write_text(json.dumps(index))
    code, out, _ = run("convert", "saved", "out.pt", "--to", "full")
    assert code == 0 and "not read, because all shards that it lists are gone" in out
    assert torch.equal(torch.load("out.pt")["a.weight"], torch.ones(2))
    write({"a.weight": torch.zeros(2)}, tmp_path / "saved" / shard)
    code, _, err = run("convert", "saved", "out", "--to", "full")
    assert code == 2 and "two saves" in err and f"saved/{stem}" in err
    assert run("inspect", f"saved/{stem}")[0] == 0


def test_one_file_and_the_shards_of_another_save(run: Run, tmp_path: Path) -> None:
    """transformers loads the one file, others what the index lists."""
    llama(0).save_pretrained(tmp_path / "hf")
    llama(1).save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    code, _, err = run("convert", "hf", "out", "--to", "hf")
    assert code == 2 and err.startswith("error[CKM108]: ") and "two saves" in err
    assert run("inspect", "hf/model.safetensors")[0] == 0
    (tmp_path / "hf/model.safetensors").unlink()
    assert run("convert", "hf", "out", "--to", "hf")[0] == 0


# ------------------------------------------------------------------ paths


def test_links_to_nothing(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    code, _, err = run("inspect", "link")
    assert code == 2 and "symbolic link to nowhere, which does not exist" in err
    for setup in ("hf", "full"):
        code, _, err = run("convert", source, "link/out", "--to", setup)
        assert code == 2 and "is a symbolic link to nowhere, which is not there" in err
    (tmp_path / "file").touch()
    assert "file is no directory" in run("convert", source, "file/out", "--to", "hf")[2]


def test_a_name_that_is_too_long(run: Run, source: Path) -> None:
    code, _, err = run("convert", source, "a" * 250, "--to", "hf")
    assert code == 2 and "hint: choose a shorter name" in err
    assert run("convert", source, "a" * 180, "--to", "hf")[0] == 0


def test_a_config_that_is_not_there(run: Run, source: Path) -> None:
    """The config beside the weights, or none, must not take its place."""
    for setup in ("hf", "full"):
        code, _, err = run("convert", source, "out", "--to", setup, "--config-from", "typo")
        assert (code, err.startswith("error[CKM101]: --config-from typo: ")) == (2, True)
    assert not Path("out").exists()


# ------------------------------------------------------------------ saved plans


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda plan: plan["steps"].pop(), "'steps' is not what its options give"),
        (lambda plan: plan["dropped"].update(x="why"), "'dropped' is not what its options give"),
        (lambda plan: plan.update(schema=99), "is a plan of schema 99, expected 1"),
        (lambda plan: plan.pop("schema"), "it has no 'schema'"),
        (lambda plan: plan["options"].update(to="full-bf16"), "the file's options have changed"),
    ],
)
def test_an_edited_plan(run: Run, source: Path, edit: Callable[[Any], Any], says: str) -> None:
    assert run("plan", source, "--to", "full", "-o", "plan.json")[0] == 0
    assert run("convert", source, "first", "--plan", "plan.json")[0] == 0
    plan = json.loads(Path("plan.json").read_text())
    edit(plan)
    Path("plan.json").write_text(json.dumps(plan))
    code, _, err = run("convert", source, "out", "--plan", "plan.json")
    assert code == 2 and err.startswith("error[CKM209]: ") and says in err
    assert not Path("out").exists()


# ------------------------------------------------------------------ options


def test_options_that_say_something_else(run: Run, source: Path) -> None:
    code, _, err = run("doctor", "--from", "nope")
    assert code == 2 and "--from 'nope' is neither a path here nor a setup" in err
    code, _, err = run("convert", source, "out", "--to", "full", "--tp-plan", "tp.toml")
    assert code == 2 and "--tp-plan: setup full is not cut" in err
    code, _, err = run("convert", source, "out", "--to", "full", "--exclude", "a", *"b" * 200)
    assert code == 2 and "patterns need quotes" in err and len(err) < 300
    code, out, _ = run("convert", source, "out", "--to", "full", "--names-from", "torchtune")
    assert code == 0 and "--names-from torchtune: names stay as they are" in out


def test_values_too_large_for_fp16(run: Run, tmp_path: Path) -> None:
    torch.save({"norm.weight": torch.full((8,), 1e6).bfloat16(), **WEIGHTS}, tmp_path / "x.pt")
    code, _, err = run("convert", "x.pt", "out", "--to", "full-fp16")
    assert code == 2 and "setup with -bf16 or -fp32" in err and "--no-encode" in err
    assert run("convert", "x.pt", "out1", "--to", "full-bf16")[0] == 0
    assert run("convert", "x.pt", "out2", "--to", "full-fp16", "--no-encode", "norm.*")[0] == 0


def test_a_form_of_torchao_that_is_not_read(run: Run, tmp_path: Path) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    made = MXTensor.to_mx(torch.randn(32, 32).bfloat16(), "fp6_e3m2", 32)
    torch.save({"0.weight": made, "0.bias": torch.ones(32)}, tmp_path / "x.pt")
    code, out, _ = run("plan", "x.pt", "--to", "full")
    assert code == 1 and "unknown class or form, torchao." in out
    assert "weight.dequantize()" in out
    plain = {"0.weight": made.dequantize()}
    torch.save(plain, tmp_path / "x.pt")
    assert run("plan", "x.pt", "--to", "full")[0] == 0


# ------------------------------------------------------------------ words of other tools


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        (["--dtype", "bf16"], "No such option: --dtype", "the setup: --to hf-bf16; "),
        (["--torch_dtype", "bf16"], "No such option: --torch_dtype", "--to hf-bf16; "),
        (["--output", "x"], "No such option: --output", "ckptmap convert SRC DST --to hf; "),
        (["--from", "hf"], "No such option: --from", "found out from its files"),
        (["--force"], "No such option: --force", "--overwrite; "),
        (["--worldsize", "2"], "Possible options: --world-size", "ckptmap convert --help"),
        (["-to", "hf"], "No such option: -t", "long options have two dashes: --to; "),
        (["--world-size", "two"], "'two' is not a whole number", "ckptmap convert --help"),
        (["--world-size", "0"], "'0', expected a whole number of 1 or more", "--help"),
        (["--rank-timeout", "nan"], "'nan', expected a number of 1 or more", "--help"),
        (["--to"], "Option '--to' requires an argument", "ckptmap convert --help"),
    ],
)
def test_options_of_other_tools(
    typed: list[str], message: str, hint: str, run: Run, source: Path
) -> None:
    code, out, err = run("convert", source, "out", *typed)
    assert code == 2 and out == ""
    first, second = err.splitlines()
    assert message in first and hint in second and second.endswith("ckptmap convert --help")


def test_words_of_other_tools_are_no_options_of_ours(run: Run) -> None:
    """Else the hint would never be seen."""
    from ckptmap_cli.option_table import TABLE
    from ckptmap_cli.usage_hints import WORDS

    assert not {*WORDS} & {name for option in TABLE.values() for name in option.names or ()}
    assert not {*WORDS} & {"--" + name.replace("_", "-") for name in TABLE}


@pytest.mark.parametrize("device", ["gpu", "gpu:0", "GPU"])
def test_a_device_that_torch_has_not(device: str, run: Run, source: Path, tmp_path: Path) -> None:
    """Also where nothing is computed: the next run would be refused."""
    code, _, err = run("convert", source, "out", "--to", "hf", "--device", device)
    assert code == 2 and f"--device '{device}', expected cpu, cuda, or cuda:1" in err
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_there(run: Run) -> None:
    code, _, err = run("ls", "nowhere")
    assert code == 2 and err.startswith("error[CKM101]: nowhere: no such file or directory")


def test_a_generation_config_is_no_config(run: Run, source: Path, peft_run: Path) -> None:
    """The command that adds a config.json was left out where a generation_config.json lay there."""
    shutil.copytree(peft_run / "base", "model")
    os.remove("model/config.json")
    assert Path("model/generation_config.json").exists()
    code, out, _ = run("convert", "model", "out", "--to", "hf")
    assert code == 0 and "add its config.json with: ckptmap convert model out --to hf" in out
    command = out.partition("add its config.json with: ckptmap ")[2].replace(
        "MODEL", str(peft_run / "base")
    )
    assert run(*shlex.split(command))[0] == 0
    assert Path("out/config.json").exists()


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["plan", "a", "out", "--to", "hf"], "plan writes no output and takes no DST"),
        (["inspect", "a", "b"], "ckptmap diff A B"),
        (["verify", "out", "a"], "its source with --against SRC"),
        (["report", "a", "b.html"], "-o FILE names the file"),
        (["diff", "a", "b", "c"], "patterns need quotes"),
    ],
)
def test_one_argument_too_many(typed: list[str], hint: str, run: Run) -> None:
    code, _, err = run(*typed)
    assert code == 2 and "unexpected extra argument" in err.splitlines()[0]
    assert hint in err.splitlines()[1] and err.rstrip().endswith(f"ckptmap {typed[0]} --help")


@pytest.mark.parametrize(
    "text", ["Entry not found", "Access to model x/y is restricted.\n" * 9, "hello"]
)
def test_a_text_under_the_name_of_weights(text: str, run: Run, tmp_path: Path) -> None:
    """The Hub answers in plain text what curl saves under the name of the weights."""
    for name in ("model.safetensors", "model.bin"):
        (tmp_path / name).write_text(text)
        code, _, err = run("inspect", name)
        assert code == 2 and err.startswith(
            f"error[CKM103]: {name}: is text, not weights: it begins '{text[:5]}"
        )


def test_a_text_is_no_config_and_no_gguf(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    code, _, err = run("convert", source, "out", "--to", "hf", "--config-from", "notes.txt")
    assert code == 2 and "expected a config.json" in err and "GGUF" not in err


@pytest.mark.parametrize("to", ["full-nf4", "full-int8", "full-fp16"])
def test_a_tensor_that_no_encoding_takes_is_named_in_the_hint(
    to: str, run: Run, tmp_path: Path
) -> None:
    """`--no-encode` alone lacks its pattern; with the hint pasted the same run succeeds."""
    bad = torch.full((64, 64), 1e20 if to == "full-fp16" else torch.nan)
    torch.save({**WEIGHTS, "layers.2.mlp.weight": bad}, tmp_path / "x.pt")
    code, _, err = run("convert", "x.pt", "out.pt", "--to", to)
    assert code == 2 and "error[CKM309]: layers.2.mlp.weight: " in err
    words = shlex.split(err.partition("hint: ")[2].replace(",", " "))
    at = words.index("--no-encode")
    assert words[at + 1] == "layers.2.mlp.weight"
    assert run("convert", "x.pt", "out.pt", "--to", to, *words[at : at + 2])[0] == 0


def test_a_misspelt_entry_to_drop_is_answered_with_the_nearest(run: Run, tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "epoch": 3}, tmp_path / "x.pt")
    code, _, err = run("convert", "x.pt", "out.pt", "--to", "full", "--drop", "epohc")
    assert code == 2 and "error[CKM206]: --drop 'epohc': nothing in x.pt is named so" in err
    assert "hint: did you mean 'epoch'?" in err and not (tmp_path / "out.pt").exists()


def test_a_misspelt_like_is_not_passed_over(run: Run, source: Path, tmp_path: Path) -> None:
    """Also where nothing needs it: it was taken in silence."""
    (tmp_path / "nowhere.pt").write_bytes(b"")
    for like in ("nowhere", "nowhere/config.json"):
        code, _, err = run("convert", source, "out", "--to", "hf", "--like", like)
        assert code == 2 and err.startswith(f"error[CKM101]: {like}: ")
    with pytest.raises(SourceError, match="no such file"):
        ckptmap.open(source, like="nowhere")
    with ckptmap.open(source) as ckpt, pytest.raises(SourceError, match="no such file"):
        ckptmap.plan(ckpt, "hf", like="nowhere")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["optimizer_0", "optimizer"])
def test_the_optimizer_of_a_directory_is_named_alone(name: str, run: Run, tmp_path: Path) -> None:
    """accelerate saves it beside the weights: the hint names the directory of both, which converts."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "run"
    state = {"layers.0.weight": {"exp_avg": torch.ones(64, 64), "step": torch.tensor(1.0)}}
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=folder / name, no_dist=True)
    code, _, err = run("convert", f"run/{name}", "out", "--to", "hf")
    assert code == 2 and "error[CKM206]" in err
    assert err.rstrip().endswith("give the directory that holds the weights, too: run")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("info", "inspect"), ("compare", "diff"), ("version", "--version"), ("upload", "push")],
)
def test_commands_of_other_tools(typed: str, meant: str, run: Run) -> None:
    """`version` was answered with `verify`."""
    code, _, err = run(typed)
    assert code == 2 and f"hint: did you mean: ckptmap {meant}; ckptmap --help" in err
    assert "verify" not in err and err.count("did you mean") == 1
    assert run(meant, "--help")[0] == 0


@pytest.mark.parametrize("name", ["load", "save", "translate", "open"])
def test_calls_of_the_library_are_no_commands(name: str, run: Run) -> None:
    code, _, err = run(name, "x.pt")
    assert code == 2 and f"ckptmap.{name}(" in err and hasattr(ckptmap, name)


def test_words_for_commands_are_no_commands_of_ours() -> None:
    from ckptmap_cli.typer_app import COMMANDS
    from ckptmap_cli.usage_hints import COMMANDS_MEANT, IN_PYTHON

    assert not {*COMMANDS} & {*COMMANDS_MEANT, *IN_PYTHON}
    assert {*COMMANDS, "--help", "--version"} >= {*COMMANDS_MEANT.values()}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--keys", "--include PATTERN"), ("--filter", "--include PATTERN"), ("--shard-size", "--max-shard-size 5GB")],
)  # fmt: skip
def test_options_of_other_tools_are_answered_with_ours(run: Run, typed: str, meant: str) -> None:
    """The nearest names were `--keep` and `--world-size`."""
    code, _, err = run("convert", "a", "b", "--to", "hf", typed, "x")
    assert code == 2 and meant in err and "--keep" not in err and "--world-size" not in err


def test_a_path_that_begins_with_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint names it so that it is no option, for a shell, too."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "-a model.pt")
    assert main(["inspect", "-a model.pt"]) == 2
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert "typed as './-a model.pt'; ckptmap inspect --help" in hint
    assert main(["inspect", shlex.split(hint.partition("typed as ")[2])[0].rstrip(";")]) == 0
