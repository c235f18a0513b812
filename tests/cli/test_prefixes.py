"""What is printed where a prefix keeps names from matching mends it when it is pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from ckptmap_cli.option_table import TABLE
from ckptmap_cli.typed_options import field_of
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.options import LoadKeywords
from ckptmap.planning.options import ConvertKeywords
from tests.corpus.models import tiny_llama

Writer = Callable[[nn.Module], nn.Module]


class Distillation(nn.Module):
    """Student, teacher and a loss with a buffer, as self-supervised training saves them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = model, tiny_llama()
        self.dino_loss = nn.BatchNorm1d(3)


class Lightning(nn.Module):
    """A training module that holds the model, compiled, as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = torch.compile(model, backend="eager")


WRITERS: dict[str, Writer] = {
    "an EMA": AveragedModel,
    "Lightning": Lightning,
    "distillation": Distillation,
    "inside two": lambda model: nn.ModuleDict({"agent": nn.ModuleDict({"net": model})}),
    "a name with a space": lambda model: nn.ModuleDict({"my net": model}),
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama()


@pytest.fixture(params=[name for name in WRITERS if name != "a name with a space"])
def source(request: pytest.FixtureRequest, model: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "run.pt"
    torch.save({"state_dict": WRITERS[request.param](model).state_dict(), "epoch": 3}, path)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    return path


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(arg) for arg in args])
    return code, "".join(capsys.readouterr())


def pasted(text: str) -> list[str]:
    """The options in the last `add ...` of what was printed."""
    found = re.findall(r"add (--.+)$", text, re.MULTILINE)
    assert found, text
    return shlex.split(found[-1].replace(", in convert also", ""))


def test_the_options_that_each_command_prints(
    source: Path, model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.pt"
    for command in (
        ["inspect", source],
        ["plan", source, "--to", "hf"],
        ["convert", source, tmp_path / "no", "--to", "full", "--names", "hf-memory"],
        [
            "convert",
            source,
            tmp_path / "no",
            "--to",
            "full",
            "--names",
            "hf",
            "--names-from",
            "llama/meta",
        ],
    ):
        _, text = printed(capsys, *command)
        options = pasted(text)
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}.pt"
        code, text = printed(
            capsys, "convert", source, out, "--to", "full", "--drop", "epoch", *options
        )
        assert code == 0, text
        assert printed(capsys, "diff", out, plain, "--values")[0] == 0
        model.load_state_dict(torch.load(out))
    assert not (tmp_path / "no").exists()


def test_the_command_that_diff_prints(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for a, b in ((source, tmp_path / "plain.pt"), (tmp_path / "plain.pt", source)):
        code, text = printed(capsys, "diff", a, b)
        assert code == 1
        assert "--like" not in text
        (command,) = re.findall(r"without it: ckptmap (.+)", text)
        _, text = printed(capsys, *shlex.split(command))
        assert re.search(r"^(the same|different): 21 tensors agree", text, re.MULTILINE), text


def test_a_command_names_the_dict_of_the_weights_again(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = {
        name: {f"net.{k}": v for k, v in model.state_dict().items()} for name in ("ema", "raw")
    }
    torch.save(twice, tmp_path / "two.pt")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    _, text = printed(
        capsys, "diff", tmp_path / "two.pt", tmp_path / "plain.pt", "--source-root", "ema"
    )
    (command,) = re.findall(r"without it: ckptmap (.+)", text)
    assert printed(capsys, *shlex.split(command))[0] == 0


def test_the_arguments_that_load_prints(source: Path, model: nn.Module) -> None:
    with pytest.raises(LoadError, match=r"load it with .*: 21 of 21 names match then") as refused:
        ckptmap.load(source, model)
    assert refused.value.code == "CKM501"
    assert len(loaded(source, model, refused.value.hint).loaded) == 21
    with pytest.raises(LoadError, match="load it with") as none:
        ckptmap.load(source, model, strict=False)
    assert none.value.hint == refused.value.hint


def loaded(source: Path, model: nn.Module, hint: str) -> Any:
    (arguments,) = re.findall(r"load it with (.+): \d+ of \d+ names", hint)
    return eval(
        f"load(source, model, {arguments})",
        {"load": ckptmap.load, "source": source, "model": model},
    )


def test_into_a_module_that_holds_the_model(source: Path, tmp_path: Path) -> None:
    """A plain checkpoint into each of the writers' own modules."""
    with ckptmap.open(source) as ckpt:
        name = next(
            name
            for name, make in WRITERS.items()
            if set(make(tiny_llama()).state_dict()) == set(ckpt.names.values())
        )
    outer = WRITERS[name](tiny_llama())
    with pytest.raises(LoadError, match="load it with") as refused:
        ckptmap.load(tmp_path / "plain.pt", outer)
    assert len(loaded(tmp_path / "plain.pt", outer, refused.value.hint).loaded) == 21


def test_the_expression_that_translate_prints(source: Path, model: nn.Module) -> None:
    state_dict = torch.load(source)["state_dict"]
    with pytest.raises(LoadError, match=r"pass \{") as refused:
        ckptmap.translate(state_dict, like=model)
    (expression,) = re.findall(r"pass (\{.+\}): ", refused.value.hint)
    state = eval(expression, {"state_dict": state_dict})
    assert set(ckptmap.translate(state, like=model, strict=False)) == set(model.state_dict())


def test_a_name_that_cannot_be_pasted_is_not_printed(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(WRITERS["a name with a space"](model).state_dict(), tmp_path / "run.pt")
    _, text = printed(capsys, "inspect", tmp_path / "run.pt")
    assert "--strip-prefix" not in text
    with pytest.raises(LoadError, match="or give names with rename="):
        ckptmap.load(tmp_path / "run.pt", model)


def test_names_of_an_option_agree() -> None:
    """The command line and Python call an option by one name."""
    other = {name: field_of(name) for name in TABLE if field_of(name) != name}
    assert other == {"max_shard_size": "max_shard_nbytes"}  # Python takes both
    also = {
        flag.removeprefix("--").replace("-", "_")
        for option in TABLE.values()
        for flag in option.names[1:]
    }
    assert {*TABLE, *other.values(), *also, "progress"} == set(ConvertKeywords.__annotations__)
    names = {"strip_prefix", "rename", "add_prefix", "drop", "max_memory"}
    assert names <= set(TABLE) and names <= set(LoadKeywords.__annotations__)
