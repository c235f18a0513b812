"""The report in a real, headless Chromium: it draws, it can be used by keys, and it runs no name.

Skipped where no Chromium is installed: `apt-get install -y chromium`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptmap
from tests.operations.report.test_page import HOSTILE
from tests.support.chromium import Page, browser, opened_browser
from tests.support.sparse import write_sparse

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")
ROWS = "[...document.querySelectorAll('#tree [role=row][id]')]"
ACTIVE = "document.querySelector('#tree .active').textContent"
WAIT = "new Promise(done => setTimeout(done, 400))"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a model of 2 layers and 50 experts, with a plan."""
    folder = tmp_path_factory.mktemp("experts")
    source = write_sparse(folder / "model.safetensors", layers=2, experts=50)
    file = folder / "report.html"
    file.write_text(ckptmap.report(source, to="fsdp2-bf16", world_size=2))
    return file


def search(page: Page, text: str) -> str:
    """Type a text into the search; return how many tensors the page has found."""
    page.value(
        f"(s => {{ s.value = '{text}'; s.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('search'))"
    )
    page.value(WAIT)
    return str(page.value("document.getElementById('found').textContent"))


def test_the_tree_by_keys_and_by_search(page: Page, experts: Path) -> None:
    page.open(experts)
    assert page.value(WAIT) is None and not page.problems()
    assert page.value("document.getElementById('tree').getAttribute('role')") == "treegrid"
    page.value("document.getElementById('tree').focus()")
    assert page.value(ACTIVE).startswith("▾model  306")
    page.press("ArrowDown", "ArrowDown")
    assert "layers" in page.value(ACTIVE)
    assert page.value("document.querySelector('#tree .active').getAttribute('aria-level')") == "2"
    page.press("End")
    assert "norm.weight" in page.value(ACTIVE)
    detail = page.value("document.getElementById('tensor-detail').textContent")
    assert (
        "model.norm.weight" in detail and "[0] + [256]" in detail and "model.safetensors" in detail
    )
    assert search(page, ".7.up_proj") == "2 tensors found"
    assert sum("up_proj" in text for text in page.value(f"{ROWS}.map(r => r.textContent)")) == 2


def test_the_map_by_keys_and_by_pointer(page: Page, experts: Path) -> None:
    page.open(experts)
    page.value("document.getElementById('shards').scrollIntoView({behavior: 'instant'})")
    page.value(WAIT)
    page.value("document.querySelector('#shard-map [role=grid]').focus()")
    page.press("ArrowRight")
    said = "document.querySelector('#shard-map .detail').textContent"
    assert "model.safetensors · model.layers.0" in page.value(said)
    assert "152 boxes" in page.value(said) and "and 128 more" in page.value(said)
    where = page.value(
        "(b => [b.left + b.width - 8, b.bottom - 8])"
        "(document.querySelector('#shard-map svg').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    assert "model.norm.weight" in page.value(said)
    assert page.value("document.querySelectorAll('.flow path').length") == 1
    assert not page.problems()


def test_hostile_names_are_text(page: Page, tmp_path: Path) -> None:
    weights = {f"{name}.{i}": torch.zeros(2) for i, name in enumerate(HOSTILE)}
    weights |= {"x" * 4999 + end: torch.zeros(2) for end in "yz"}  # shown alike
    torch.save(weights, tmp_path / "model.pt")
    file = tmp_path / "report.html"
    file.write_text(ckptmap.report(tmp_path / "model.pt", to="full-bf16"))
    page.open(file)
    page.value("addEventListener('error', () => {}); scrollTo(0, 1e6)")
    page.value(WAIT)
    assert page.problems() == []
    assert page.value("document.scripts.length") == 2  # the data, and the script
    assert page.value("document.querySelectorAll('img').length") == 0
    shown = page.value("document.getElementById('tree').textContent")
    assert "</script><script>alert(1)</script>" in shown and "\\u202e" in shown
    assert search(page, "x" * 900) == "3 tensors found"
    # The policy holds whatever gets into the page: a script that is added does not run.
    page.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran=1\">');"
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran=1'}))"
    )
    page.value(WAIT)
    assert page.value("window.ran === undefined")


def test_a_phone_and_darkness(page: Page, experts: Path) -> None:
    page.open(experts, 390, 844, color_scheme="dark", reduced_motion="reduce")
    page.value(WAIT)
    assert page.value("document.documentElement.scrollWidth") == 390
    back = page.value("getComputedStyle(document.body).backgroundColor")
    page.open(experts, 390, 844, color_scheme="light")
    assert page.value("getComputedStyle(document.body).backgroundColor") != back


def test_without_scripts(page: Page, experts: Path) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(experts)
        tree = page.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        body = page.call("DOM.querySelector", nodeId=tree, selector="noscript table")
        assert body["nodeId"]
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
