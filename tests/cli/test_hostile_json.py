"""JSON that somebody damaged, in every file that ckptmap reads: one line, and no internal error.

Each document is one that a real writer made; one value of it after the other is replaced.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file

from ckptmap.storage.journal import Journal, Written
from ckptmap.storage.locks import read_owner

HOSTILE = {
    "deep array": "[" * 1500 + "]" * 1500,
    "deep object": '{"a":' * 1500 + "1" + "}" * 1500,
    "long integer": "9" * 4000,
    "longer integer": "-" + "9" * 5000,
    "beyond float64": "1e400",
    "twice": '{"a": 1, "a": 2}',
    "lone surrogate": '"\\ud800"',
    "number": "3",
    "null": "null",
    "array": "[]",
}
MARK = "@@ a value @@"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def documents(good: str, value: str) -> Iterator[str]:
    """The value alone; then the good document with each of its values replaced."""
    yield value
    tree = json.loads(good)
    nodes: list[Any] = [tree]
    for node in nodes:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            before = node[key]
            node[key] = MARK
            yield json.dumps(tree).replace(f'"{MARK}"', value)
            node[key] = before
            if isinstance(before, dict | list):
                nodes.append(before)


def model(folder: Path) -> Path:
    folder.mkdir()
    weights = {"model.embed_tokens.weight": torch.ones(8, 8), f"{Q_PROJ}.weight": torch.ones(8, 8)}
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config(folder: Path) -> tuple[Path, list[str]]:
    src = model(folder / "in")
    return src / "config.json", ["plan", str(src), "--to", "hf-int8", "--names", "auto"]


def index(folder: Path) -> tuple[Path, list[str]]:
    src = model(folder / "in")
    (src / "model.safetensors").rename(src / "model-00001-of-00001.safetensors")
    names = ("model.embed_tokens.weight", f"{Q_PROJ}.weight")
    listed = {
        "metadata": {"total_size": 512},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    file = src / "model.safetensors.index.json"
    file.write_text(json.dumps(listed))
    return file, ["inspect", str(src)]


def adapter(folder: Path) -> tuple[Path, list[str]]:
    src, lora = model(folder / "in"), folder / "lora"
    lora.mkdir()
    low = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(8, 2)}
    weights = {f"base_model.model.{Q_PROJ}.{name}.weight": each for name, each in low.items()}
    save_file(weights, lora / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    args = ["merge", str(src), str(lora), str(folder / "out"), "--overwrite", "--quiet"]
    return lora / "adapter_config.json", args


def plan(folder: Path) -> tuple[Path, list[str]]:
    src, file = model(folder / "in"), folder / "plan.json"
    assert main(["plan", str(src), "--to", "full", "-o", str(file)]) == 0
    args = ["convert", str(src), str(folder / "out.pt"), "--plan", str(file), "--overwrite", "-q"]
    return file, args


def param_order(folder: Path) -> tuple[Path, list[str]]:
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "c.pt")
    (folder / "order.json").write_text('[["weight", "bias"]]')
    order = str(folder / "order.json")
    return Path(order), ["plan", str(folder / "c.pt"), "--to", "fsdp2", "--param-order", order]


def manifest(folder: Path) -> tuple[Path, list[str]]:
    src, out = model(folder / "in"), folder / "out"
    assert main(["convert", str(src), str(out), "--to", "fsdp2", "--quiet"]) == 0
    return out / "ckptmap.manifest.json", ["verify", str(out)]


def lock(folder: Path) -> tuple[Path, list[str]]:
    src, file = model(folder / "in"), folder / ".out.ckptmap-lock"
    owner = {"host": socket.gethostname(), "pid": (1 << 22) - 3, "start": 5, "token": "ab"}
    file.write_text(json.dumps(owner))
    args = ["convert", str(src), str(folder / "out"), "--to", "hf", "--overwrite", "--quiet"]
    return file, args


Made = Callable[[Path], tuple[Path, list[str]]]
MAKERS: list[Made] = [config, index, adapter, plan, param_order, manifest, lock]
"""The lock is last: one that cannot be read is told by its file alone."""


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_no_document_is_an_internal_error(
    make: Made,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptmap.storage.locks.ATTEMPTS", 2)
    file, args = make(tmp_path)
    good = file.read_text()
    capsys.readouterr()
    refused = 0
    for text in documents(good, value):
        file.write_text(text)
        code = main(args)
        said = capsys.readouterr().err
        assert code in (0, 1, 2), (text[:80], said)
        assert "please report" not in said
        if code:
            refused += 1
            assert len(said.rstrip("\n").splitlines()) == 2 or make is manifest, said
    assert refused, "nothing was refused"


@pytest.mark.parametrize("make", MAKERS[:-1], ids=lambda make: make.__name__)
def test_the_line_names_file_place_expected_and_got(
    make: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, args = make(tmp_path)
    capsys.readouterr()
    file.write_text('[1,\n  "a" "b"]')
    assert main(args) == 2
    said = capsys.readouterr().err
    shown = file.parent if make is manifest else file
    assert said.startswith("error[CKM") and str(shown) in said
    assert """line 2, column 7: expected ',' delimiter, got '"b"]'""" in said


@pytest.mark.parametrize("name", ["n" * 300, "é" * 200, "/".join(["n" * 200] * 30), "a\0b"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_name_that_no_file_can_have_is_absent(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"a.weight": torch.ones(4, 4)}
    if kind == "bin":
        torch.save(weights, tmp_path / "other.bin")
    else:
        save_file(weights, tmp_path / "other.safetensors")
    stem = {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[kind]
    listed = {"metadata": {}, "weight_map": {"a.weight": f"{name}.{kind}"}}
    (tmp_path / f"{stem}.index.json").write_text(json.dumps(listed))
    assert main(["inspect", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "error[CKM108]" in said or ("\0" in name and "error[CKM116]" in said)


@pytest.mark.parametrize("order", ["3", '"weight"', "[3]", '["weight"]', "[[3]]", '{"a": 1}'])
def test_a_plan_with_an_order_that_is_none(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, args = plan(tmp_path)
    file.write_text(file.read_text().replace('"param_order": null', f'"param_order": {order}'))
    capsys.readouterr()
    assert main(args) == 2
    said = capsys.readouterr().err
    assert "error[CKM209]" in said and "expected a list of names for each group" in said


@pytest.mark.parametrize("pid", ["1e400", "9" * 5000, "NaN", '"7"', "null", "[]"])
def test_a_lock_whose_owner_is_no_process(pid: str, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text(f'{{"host": "h", "pid": {pid}, "start": 1, "token": "t"}}')
    assert read_owner(file) is None


@pytest.mark.parametrize("crc", ["4294967296", "-1", "1e400", "9" * 5000, '"7"', "[" * 1500])
def test_a_journal_line_with_no_crc_is_a_unit_not_written(crc: str, tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with Journal(file, "digest") as journal:
        journal.add("a", [Written(0, 0, "00", 7)])
    with file.open("a") as handle:
        handle.write(f'{{"unit": "b", "slots": [[0, 1, "00", {crc}]]}}\n')
    with Journal(file, "digest") as journal:
        assert journal.entries == {"a": (Written(0, 0, "00", 7),)}
