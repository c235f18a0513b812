"""`make gpu`: on a CPU its steps run at a tiny size, and no step that goes wrong ends the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckptmap
from benchmarks.gpu_session import (
    capped,
    encoders,
    equality,
    memory,
    profile_convert,
    rates,
    read_forms,
)
from benchmarks.gpu_session import session as session_module
from benchmarks.gpu_session.results import StepResult, table
from benchmarks.gpu_session.session import Options, Step, StepRun, run_session
from benchmarks.gpu_session.steps import STEPS
from benchmarks.gpu_session.timing import weight
from ckptmap import registry
from ckptmap.errors import RunError
from ckptmap.quantization.blockwise import chunks
from ckptmap.storage import device_copies
from ckptmap.tensors import TensorInfo
from tests.support.late_device import Late
from tests.support.paths import ROOT

MISSING = (
    "torchao",
    "bitsandbytes",
    "compressed_tensors",
    "isal",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "typer",
    "rich",
    "huggingface_hub",
)
"""What a machine that is lent for ten minutes may lack."""
HOOK = f"""
import sys
from importlib.machinery import PathFinder

class Without:
    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {MISSING}:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""A sitecustomize by which these cannot be imported."""


LONG_S = 1500.0
"""For all steps in one session, which take half a minute where nothing else is done."""
FORKED = "tests.support.forked_session"
REAL = "recode"
"""The step that is run in a process of its own where little is installed; the others are forked."""


def session(
    folder: Path, *options: str, module: str = "benchmarks.gpu_session", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--out", str(folder / "out"), *options]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=LONG_S,
    )  # fmt: skip


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "gpu-session.json").read_text())
    return found


# ------------------------------------------------------------------------------- the steps


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The folders of two sessions where nothing is installed but torch and a few libraries, and ckptmap not either:
    of all steps but one in forks, False, and of that one in its own process, True."""
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(HOOK)
    forked = ",".join(one.name for one in STEPS if one.name != REAL)
    found = {}
    for real, steps, options in (
        (False, forked, {"module": FORKED}),
        (True, REAL, {}),
    ):
        found[real] = tmp_path_factory.mktemp("session")
        asked = ("--device", "cpu", "--size", "tiny", "--limit", str(LONG_S), "--steps", steps)
        done = session(found[real], *asked, PYTHONPATH=str(hook), **options)
        assert (found[real] / "out" / "gpu-session.json").exists(), done.stdout + done.stderr
        states = [step["status"] for step in written(found[real])["steps"]]
        is_good = all(state.startswith(("passed", "skipped")) for state in states)
        assert done.returncode == (not is_good), done.stdout + done.stderr
    return found


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("one", STEPS, ids=lambda one: one.name)
def test_every_step_runs_on_a_cpu(one: Step, on_a_cpu: dict[bool, Path]) -> None:
    folder = on_a_cpu[one.name == REAL]
    found = written(folder)
    assert found["versions"].keys().isdisjoint(MISSING)
    (step,) = (step for step in found["steps"] if step["name"] == one.name)
    wanted = "skipped: needs CUDA" if one.cuda else "passed"
    assert step["status"] == wanted, step["error"]
    assert all(check["ok"] for check in step["checks"])
    assert not one.cuda or not step["figures"] + step["checks"]
    assert one.cuda or one.name == "profile" or step["figures"] or step["checks"]
    assert f"| {one.name} | {wanted} |" in (folder / "out" / "gpu-session.md").read_text()
    logs = [log.read_text() for log in (folder / "out").glob("*.log")]
    assert not any(f"== {one.name}:" in log for log in logs), "only of steps that did not pass"


def test_the_kernels_of_libraries_are_measured_beside_ours(tmp_path: Path) -> None:
    asked = ("--device", "cpu", "--size", "tiny", "--steps", "equality,rates")
    done = session(tmp_path, *asked, module=FORKED)
    assert done.returncode == 0, done.stdout + done.stderr
    equality, rates = written(tmp_path)["steps"]
    measured = {one["what"] for one in equality["figures"] + rates["figures"]}
    assert measured >= {
        "kernel of torchao: to_nf4", "kernel of bitsandbytes: quantize_4bit",
        "bitsandbytes' nf4 on this device: bytes of codes that differ",
    }  # fmt: skip


def test_every_scheme_of_the_registry_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a release adds cannot be forgotten: the step itself fails, and this test before it."""
    encoded: dict[str, int] = {}
    for dtype in equality.DTYPES:
        for shape in equality.TINY_SHAPES:
            encoded |= dict.fromkeys(encoders.encodings(TensorInfo(shape, dtype)), 1)
    assert read_forms.compared(encoded) == []
    new = SimpleNamespace(name="new", suffix="", target=lambda name, info: None)
    known = registry.schemes()
    monkeypatch.setattr(registry, "schemes", lambda: (*known, new))
    assert read_forms.compared(encoded) == ["new"]


def test_a_decoder_that_differs_on_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, encoding, info = next(form for form in read_forms.more_forms() if form[0] == "awq")
    assert equality.decoded_apart(encoding, info, "cpu") == []
    calls = iter((0.0, 1.0))
    real = equality.decode
    monkeypatch.setattr(equality, "decode", lambda *given: real(*given).add_(next(calls)))
    (line,) = equality.decoded_apart(encoding, info, "cpu")
    assert line.startswith("Awq(") and "decoded: " in line


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it would run")
    done = session(tmp_path)
    assert (done.returncode, done.stdout) == (0, "CUDA: not run\n")
    assert not (tmp_path / "out").exists(), "nothing was measured"


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    done = session(tmp_path, "--device", "cpu", "--steps", "facts,nonsense")
    assert done.returncode == 2
    assert "no step nonsense; there are facts, unseen, equality," in done.stderr


# ------------------------------------------------------------------------------- what goes wrong


def step(name: str, limit_s: float = 60, **options: Any) -> Step:
    return Step(name, f"it {name}", f"tests.support.gpu_steps:{name}", limit_s, **options)


def run(tmp_path: Path, *steps: Step, limit_s: float = 300) -> dict[str, Any]:
    """The steps by name; what was written is what is returned."""
    options = Options(tmp_path / "out", "cpu", "tiny", limit_s, tmp_path)
    returned = run_session(steps, options, "cpu")
    assert written(tmp_path) == json.loads(json.dumps(returned))
    return {found["name"]: found for found in returned["steps"]}


def test_the_session_goes_on_after_steps_that_go_wrong(tmp_path: Path) -> None:
    names = ("wrong", "raises", "kills_itself", "good")
    found = run(tmp_path, *map(step, names))
    assert [found[name]["status"] for name in names] == [
        "failed", "failed", "crashed: SIGKILL", "passed",
    ]  # fmt: skip
    failed = [check for check in found["wrong"]["checks"] if not check["ok"]]
    assert [check["what"] for check in failed] == ["bytes", "the second half"]
    assert failed[1]["detail"] == "ValueError: no such kernel"
    assert found["wrong"]["checks"][-1] == {"what": "goes on", "ok": True, "detail": ""}
    assert "RuntimeError: the device is gone" in found["raises"]["error"]
    for name in ("raises", "kills_itself"):
        assert found[name]["figures"][0]["what"] == "before", "what it found before is kept"
    table = (tmp_path / "out" / "gpu-session.md").read_text()
    assert "- WRONG: bytes\n\n```\nexpected 1, got 2\n```" in table
    assert "| a rate | 3 GB/s | 0.5 of the link | 0.8 |" in table
    log = (tmp_path / "out" / "gpu-session.log").read_text()
    assert "== raises: failed\n" in log and "RuntimeError: the device is gone" in log
    assert "== good" not in log


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run(tmp_path, step("hangs", limit_s=4), step("good"))
    assert time.monotonic() - started < 200
    assert found["hangs"]["status"] == "timed out after 16 s"
    assert found["hangs"]["figures"][0]["what"] == "before"
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    assert "in hangs" in found["hangs"]["error"], "where it hung is in the log"
    assert found["good"]["status"] == "passed"


def test_goals_stand_before_all_tables_those_that_are_missed_first() -> None:
    made = StepResult()
    made.figure("copied", 5.0, "GB/s", ratio=0.9, of="the pinned link", goal=0.8)
    made.figure("loaded", 3.0, "GB/s", ratio=0.3, of="the pinned link", goal=0.6)
    made.figure("written", 3.0, "GB/s", ratio=0.3, of="the CPU")
    step = {
        "name": "a",
        "status": "passed",
        "seconds": 1.0,
        "what": "",
        "error": "",
        **made.found(),
    }
    session = {"date": "", "device_name": "", "size": "tiny", "versions": {}, "steps": [step]}
    text = table(session)
    goals = text[text.index("## Goals") : text.index("## a: passed")]
    first, second = [line for line in goals.splitlines() if line.startswith("| a ")]
    assert first == "| a | loaded | 3 GB/s | 0.3 of the pinned link | 0.6 | **no** |"
    assert second.endswith("| 0.8 | yes |") and "written" not in goals
    made.figures.clear()
    assert "## Goals" not in table({**session, "steps": [{**step, **made.found()}]})


def test_no_step_begins_when_the_time_is_up(tmp_path: Path) -> None:
    found = run(tmp_path, step("good"), step("raises"), limit_s=1)
    assert {one["status"] for one in found.values()} == {"not run: the time of the session was up"}


def test_a_step_says_what_it_needs(tmp_path: Path) -> None:
    found = run(
        tmp_path, step("raises", needs=("torch", "no_such_library")), step("good", cuda=True)
    )
    assert found["raises"]["status"] == "skipped: needs no_such_library"
    assert found["good"]["status"] == "skipped: needs CUDA"


def test_what_needs_a_missing_library_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (session_module, rates):
        monkeypatch.setattr(module, "is_importable", lambda name: name != "xxhash")
    needing = [one for one in STEPS if one.name not in ("facts", "equality", "rates", "suite")]
    found = run(tmp_path, *needing)
    assert len(found) == 9
    assert {one["status"].rpartition(" ")[2] for one in found.values()} == {"xxhash"}
    for name in ("links", "staged_rates", "staged_by_feed", "kernel_times"):
        monkeypatch.setattr(rates, name, lambda *given: 1.0)
    one = step_run(tmp_path)
    rates.run(one)
    assert one.result.notes == ["conversions: not run: need xxhash"]


def test_a_process_that_does_not_die_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait in the driver of a device, where no signal reaches it."""
    waited: list[float] = []

    def wait(timeout: float) -> None:
        waited.append(timeout)
        raise subprocess.TimeoutExpired("step", timeout)

    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, signal: killed.append(pid))
    session_module._kill(SimpleNamespace(pid=7, wait=wait))  # type: ignore[arg-type]
    assert killed == [7] and waited == [session_module.DEATH_S]


def test_a_session_that_is_killed_in_its_first_step_has_left_its_files(tmp_path: Path) -> None:
    assert run(tmp_path) == {}
    assert "# GPU session of" in (tmp_path / "out" / "gpu-session.md").read_text()
    began = time.monotonic() - 1000  # importing torch counts, too
    options = Options(tmp_path / "out", "cpu", "tiny", 900, tmp_path, began)
    (late,) = run_session([step("good")], options, "cpu")["steps"]
    assert late["status"] == "not run: the time of the session was up"


# ------------------------------------------------------------------------------- what needs CUDA


def step_run(tmp_path: Path) -> StepRun:
    return StepRun("cpu", "tiny", tmp_path, StepResult(tmp_path / "result.json"))


@pytest.mark.parametrize(("name", "times"), [("nf4", 1), ("ct-nvfp4", 2)])
def test_values_are_staged_as_a_conversion_does(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a device that only pretends; 5 boxes, each encoded after its copy, or first only looked at."""
    way = Late()
    monkeypatch.setattr(device_copies, "Lanes", lambda device: way)
    monkeypatch.setattr(chunks, "DEVICE_NUMEL", 1 << 12)
    info, w = TensorInfo((128, 160), "bfloat16"), weight(160, "bfloat16")[:128]
    encoding = encoders.encodings(info)[name]
    monkeypatch.setattr(
        Late, "upload", lambda self, there, here: self.uploads.append(there.copy_(here))
    )
    rates.staged(encoding, info, w, "cpu")()
    assert [len(there) for there in way.uploads] == [4096] * 5 * times


def test_a_cap_is_lowered_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capped_to: list[float] = []
    total = 1 << 40
    properties = SimpleNamespace(total_memory=total)
    stands_in = {
        "get_device_properties": lambda device: properties,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_reserved": lambda: 5 << 20,
        "set_per_process_memory_fraction": capped_to.append,
    }
    for name, function in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, function)
    one = step_run(tmp_path)
    capped.run(one)
    assert [round(share * total) >> 20 for share in capped_to[: len(capped.CAPS)]] == list(
        capped.CAPS
    )
    assert len(one.result.checks) == len(capped.WAYS) * len(capped.CAPS)
    assert all(check.ok for check in one.result.checks)


def test_what_a_block_of_code_held_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what was held before it."""
    pinned = {
        "allocated_bytes.current": 1 << 20, "allocated_bytes.peak": 9 << 20,
        "active_bytes.peak": 99 << 20, "allocations.peak": 1,
    }  # fmt: skip
    stands_in = {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "reset_peak_host_memory_stats": lambda: None,
        "memory_allocated": lambda: 3 << 20,
        "max_memory_allocated": lambda: 10 << 20,
        "host_memory_stats": lambda: pinned,
    }
    for name, function in stands_in.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, function)
    one = StepRun("cuda", "tiny", tmp_path, StepResult())
    with memory.peaks(one, "load", 8 << 20):
        pass
    assert [check.ok for check in one.result.checks] == [True]
    with memory.peaks(other := StepRun("cuda", "tiny", tmp_path, StepResult()), "load", 7 << 20):
        pass
    (check,) = other.result.checks
    assert not check.ok and check.detail == "at most 7 MiB, found 8"
    assert [(f.what, f.value, f.unit) for f in one.result.figures] == [
        ("load: device memory at most", 7.0, "MiB"), ("load: pinned memory at most", 8.0, "MiB"),
    ]  # fmt: skip


def test_a_conversion_that_fails_under_a_cap_says_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a.weight": torch.zeros(64, 64)}, tmp_path / "in")
    (tmp_path / "expected").write_bytes(b"something else")

    def outcome(error: Exception | None) -> str:
        def convert(*args: Any, **options: Any) -> None:
            (tmp_path / "out").write_bytes(b"other")
            if error is not None:
                raise error

        monkeypatch.setattr(ckptmap, "convert", convert)
        return capped.outcome(
            tmp_path / "in", tmp_path / "out", "full", "cpu", tmp_path / "expected"
        )

    assert outcome(None) == "other bytes"
    assert outcome(RunError("CKM301", "no room", "free some")) == "CKM301: no room; hint: free some"
    foreign = torch.OutOfMemoryError("CUDA out of memory")
    assert outcome(foreign) == "OutOfMemoryError: CUDA out of memory"


# ------------------------------------------------------------------------------- the trace


def test_what_a_profile_counts() -> None:
    """Kernels 0-10 and 12-20, copies 8-14: busy 18 of 20, and 4 of 6 beside kernels."""
    events = [
        {"cat": "kernel", "name": "encode", "ts": 0, "dur": 10},
        {"cat": "kernel", "name": "encode", "ts": 12, "dur": 8},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 8, "dur": 6},
        {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 99},
        {"ph": "M", "name": "a name of a process"},
    ]
    kernels = profile_convert.spans(events, profile_convert.KERNELS)
    copies = profile_convert.spans(events, profile_convert.COPIES)
    assert (profile_convert.total(kernels), profile_convert.total(copies)) == (18, 6)
    assert profile_convert.total(sorted(kernels + copies)) == 20
