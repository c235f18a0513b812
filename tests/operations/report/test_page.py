"""The report of a checkpoint: its data are the checkpoint's, and no name in it is more than text."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.operations.report.collect import layers_of, projection, shared_segments
from ckptmap.operations.report.shard_map import bucketed
from ckptmap.operations.shards import ShardsReport
from tests.corpus import Corpus
from tests.support.sparse import write_sparse

HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a\"b'c`d", "&lt;b&gt;", "{{ 7*7 }}",
    "new\nline", "bidi\u202e\u2066txt", "nul\x00esc\x1b[2J", "\u2028", "]]><!--", "x" * 5000, "", "a..b", "café.名前",
)  # fmt: skip


def data(html: str) -> Any:
    """The JSON that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


def names(html: str) -> list[str]:
    """The names of all tensors, put together again as the page's script does."""
    tensors = data(html)["tensors"]
    found, before = [], ""
    for shared, tail in zip(tensors["shared"], tensors["tails"], strict=True):
        head = "".join(f"{part}." for part in before.split(".")[:shared])
        before = head + tail
        found.append(before)
    return found


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ["hf_sharded_fp32", "torch_plain", "nf4_torch_bf16"])
def test_it_shows_every_tensor_and_every_byte(corpus: Corpus, name: str) -> None:
    _complete(corpus[name].path)


@pytest.mark.parametrize("name", ["hsdp_ranks_w4", "fsdp2_dcp_optimizer_w2"])
def test_it_shows_what_ranks_hold(corpus: Corpus, name: str) -> None:
    html = _complete(corpus[name].path)
    found = data(html)
    ranks = int(name[-1])
    assert found["map"]["rows"] == [f"rank {rank}" for rank in range(ranks)]
    assert any(found["map"]["cells"][3]) == (name == "hsdp_ranks_w4")  # bytes of replicas
    assert ("Optimizer state" in html) == ("optimizer" in name)


def _complete(path: Path) -> str:
    html = ckptmap.report(path)
    with ckptmap.open(path) as ckpt:
        shards = ShardsReport(ckpt)
        state = [lazy.fqn for states in ckpt.optimizer.values() for lazy in states.values()]
        assert names(html) == [*ckpt, *state, *(lazy.fqn for lazy in ckpt.other.values())]
        setup = ckpt.setup
    found = data(html)
    rows, columns, nbytes, _, counts = found["map"]["cells"]
    assert sum(nbytes) == sum(piece.nbytes for piece in shards.pieces)
    assert sum(counts) == sum(found["map"]["listed"]) == len(shards.pieces)
    assert max(rows) < len(found["map"]["rows"]) and max(columns) < len(found["map"]["columns"])
    boxes = list(zip(*found["map"]["boxes"], strict=True))
    places = {
        (found["map"]["files"][file], offset, *map(tuple, found["map"]["forms"][form][:2]))
        for _, _, file, form, offset, _ in boxes
    }
    assert places == {(p.file, p.offset, p.box_offsets, p.box_sizes) for p in shards.pieces}
    assert setup in Elements(html).text
    return html


def test_no_name_is_more_than_text(tmp_path: Path) -> None:
    weights = {f"{name}.{i}": torch.zeros(2) for i, name in enumerate(HOSTILE)}
    folder = tmp_path / '"><script>alert(2)<'
    folder.mkdir()
    tree = {"model": weights, "</script><script>alert(3)</script>": {"<b>": "</style><script>"}}
    torch.save(tree, folder / "model.pt")
    html = ckptmap.report(folder / "model.pt", against=folder / "model.pt", to=["full-bf16", "hf"])
    page = Elements(html)
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert [tag for tag, _ in page.elements].count("img") == 0
    assert not any(key.startswith("on") for _, given in page.elements for key in given)
    assert not any(given.get("href", "#")[0] != "#" for _, given in page.elements)  # type: ignore[index]
    assert not any("style" in given or "src" in given for _, given in page.elements)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069\u2028]", html)
    assert "{{" not in page.text.replace("{{ 7*7 }}", "") and "49." not in names(html)
    assert len(html) < 500_000
    policy = next(
        given["content"]
        for tag, given in page.elements
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_errors_of_an_encoding_are_those_of_a_conversion(tmp_path: Path) -> None:
    """What --values measures without writing is what `verify` measures of what was written."""
    torch.manual_seed(0)
    weights = {f"layers.{i}.fc.weight": torch.randn(64, 128) for i in range(2)}
    weights["norm.weight"] = torch.ones(64)
    save_file(weights, tmp_path / "model.safetensors")
    found = data(
        ckptmap.report(tmp_path / "model.safetensors", to=["full-nf4", "full-int8"], values=True)
    )
    assert [each["title"] for each in found["errors"]] == ["--to full-nf4", "--to full-int8"]
    for each, to in zip(found["errors"], ("full-nf4", "full-int8"), strict=True):
        out = tmp_path / f"{to}.pt"
        ckptmap.convert(tmp_path / "model.safetensors", out, to=to)
        expected = ckptmap.verify(out, against=tmp_path / "model.safetensors").errors
        measured = dict(zip(each["cells"][6], each["cells"][2], strict=True))
        assert measured == pytest.approx(dict(expected), rel=1e-5) and len(measured) == 2
        assert each["columns"] == ["fc.weight"] and each["rows"] == ["layers.0", "layers.1"]
    with_dense = ckptmap.report(tmp_path / "full-nf4.pt", against=tmp_path / "model.safetensors")
    (against,) = data(with_dense)["errors"]
    assert against["cells"][2] == pytest.approx(found["errors"][0]["cells"][2], rel=1e-2)


def test_errors_of_kept_codes_and_of_values_that_cannot_be_encoded(
    corpus: Corpus, tmp_path: Path
) -> None:
    html = ckptmap.report(corpus["nf4_torch_bf16"].path, to="full-bnb-nf4", values=True)
    (kept,) = data(html)["errors"]
    assert "f-codes" in html and max(kept["cells"][2]) < 0.01  # of the scales alone
    weights = {"a.weight": torch.ones(64, 64), "b.weight": torch.ones(64, 64)}
    weights["a.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "m.safetensors")
    html = ckptmap.report(tmp_path / "m.safetensors", to="full-nf4", values=True)
    assert "--to full-nf4: a.weight: " in Elements(html).text
    assert data(html)["errors"][0]["cells"][6] == ["b.weight"]


@pytest.mark.python_texts
def test_a_page_made_in_python_names_no_option_of_the_command_line(tmp_path: Path) -> None:
    """But for the command to run next: titles said `--to`, hints `drop=`."""
    torch.save({"model": {"w": torch.ones(2)}, "ratio": Fraction(1, 2)}, tmp_path / "model.pt")
    text = Elements(ckptmap.report(tmp_path / "model.pt", to=["full", "hf"])).text
    assert "to='full': ratio: " in text and "drop='ratio'" in text
    commands = [line for line in text.splitlines() if "--to" in line]
    assert all("ckptmap plan" in line for line in commands), commands


def test_what_differs(tmp_path: Path) -> None:
    a = {
        "w": torch.arange(100.0),
        "only": torch.zeros(1),
        "same": torch.ones(3),
        "s": torch.ones(2),
    }
    b = {
        "w": torch.arange(100.0),
        "other": torch.zeros(1),
        "same": torch.ones(3),
        "s": torch.ones(4),
    }
    b["w"][7] = 1000.0
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    html = ckptmap.report(tmp_path / "a.safetensors", against=tmp_path / "b.safetensors")
    text = Elements(html).text
    assert "2 of 3 tensors in both differ, 1 are only in A, 1 are only in B." in text
    assert "9.930e+02" in text and "1 of 100" in text and "[7]" in text
    assert "shape [2] and [4]" in text
    (found,) = data(html)["errors"]
    assert found["cells"][4] == [0.01]  # one value of a hundred is an outlier
    without = ckptmap.report(
        tmp_path / "a.safetensors", against=tmp_path / "b.safetensors", values=False
    )
    assert "1 of 3 tensors in both differ" in Elements(without).text


def test_what_cannot_be_converted_is_told_first(tmp_path: Path) -> None:
    """A key that is refused; then a conversion that is refused as a whole."""
    torch.save({"model": {"w": torch.ones(2)}, "ratio": Fraction(1, 2)}, tmp_path / "model.pt")
    text = Elements(ckptmap.report(tmp_path / "model.pt", to="full")).text
    assert "1 finding must be answered first" in text
    assert "--to full: ratio: " in text and "--drop ratio" in text
    dropped = Elements(ckptmap.report(tmp_path / "model.pt", to="full", drop="ratio")).text
    assert "must be answered first" not in dropped and "1 key left out" in dropped
    text = Elements(ckptmap.report(tmp_path / "model.pt", to="full-nf4", encode="w")).text
    assert "--to full-nf4: w: " in text and "must be answered first" in text
    with pytest.raises(ckptmap.CkptmapError, match="is not a setup"):
        ckptmap.report(tmp_path / "model.pt", to="hg")


def test_many_tensors_take_little(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "model.safetensors", layers=40, experts=166)
    html = ckptmap.report(path)
    count = len(names(html))
    assert count == 20_002 and len(html) < 75 * count


def test_names_of_layers() -> None:
    given = ["embed.weight", "h.10.a", "h.2.b", "h.2.e.7.c", "norm.weight", "x"]
    titles, of = layers_of(given)
    assert titles == ["embed", "h.2", "h.10", "norm", "x"]
    assert [titles[i] for i in of] == ["embed", "h.10", "h.2", "h.2", "norm", "x"]
    assert [projection(name) for name in given] == [
        "embed.weight",
        "a",
        "b",
        "e.*.c",
        "norm.weight",
        "x",
    ]


def test_options_of_a_conversion_need_one(corpus: Corpus) -> None:
    path = corpus["hf_sharded_fp32"].path
    for wrong in ({"world_size": 8}, {"values": True}, {"exclude": "lm_head*"}):
        option = f"--{next(iter(wrong)).replace('_', '-')}"
        with pytest.raises(ckptmap.CkptmapError, match=f"{option} says how a conversion"):
            ckptmap.report(path, **wrong)
    with pytest.raises(ckptmap.CkptmapError, match="world_size"):
        ckptmap.report(path, to="full", wrold_size=8)
    assert "student.lm_head.weight" in names(ckptmap.report(path, add_prefix="student"))


def test_more_ranks_than_rows() -> None:
    place, titles = bucketed([f"rank {i}" for i in range(1000)], 256)
    assert len(titles) == 250 and titles[1] == "rank 4 to rank 7"
    assert [place[i] for i in (0, 3, 4, 999)] == [0, 0, 1, 249]
    assert bucketed(["a", "b"], 2) == ([0, 1], ["a", "b"]) and bucketed([], 2) == ([], [])


def test_shared_segments() -> None:
    given = ["a.b.c", "a.b.d", "a.bc.d", "a", "a.", "", ".", "a.b.c"]
    assert shared_segments(given) == (
        [0, 2, 1, 0, 0, 0, 0, 0],
        ["a.b.c", "d", "bc.d", "a", "a.", "", ".", "a.b.c"],
    )


@pytest.mark.parametrize("write", [save_file])
def test_nothing_is_in_it(tmp_path: Path, write: Any) -> None:
    write({"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}, tmp_path / "e.safetensors")
    html = ckptmap.report(tmp_path / "e.safetensors", to="full-nf4", values=True)
    assert names(html) == ["empty", "scalar"] and data(html)["errors"] == []
