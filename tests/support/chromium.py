"""A headless Chromium, driven by the DevTools protocol over a pipe: no port, no library.

Debian's package is `chromium`; `apt-get install -y chromium` installs it. Messages are JSON, each
ended by a NUL, on the browser's file descriptors 3 (to it) and 4 (from it).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip


def browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol; return its result. Events meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, file: Path, width: int = 1280, height: int = 900, **features: str) -> None:
        """Open a file and wait for its load event. `features` are media: `color_scheme="dark"`."""
        media = [
            {"name": f"prefers-{k.replace('_', '-')}", "value": v} for k, v in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press and release keys, by their names: "ArrowDown", "Tab"."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9,
                 "Home": 36, "End": 35, "Enter": 13}  # fmt: skip
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                    windowsVirtualKeyCode=codes.get(key, 0),
                )  # fmt: skip

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """Save what the page shows, its top `height` pixels, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": height or size["height"],
            "scale": 1,
        }
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """What the console said: errors, violations of the policy, requests to anywhere."""
        found = []
        for event in self.events:
            name, parameters = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif name == "Log.entryAdded":
                found.append(parameters["entry"]["text"])
            elif name == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                found += (
                    [] if url.startswith("file:") and parameters["type"] == "Document" else [url]
                )
        return found


@contextmanager
def opened_browser() -> Iterator[Page]:
    """A page of a Chromium of its own, which ends with the block."""
    path = browser()
    assert path is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    for end in (*to_browser, *from_browser):  # 3 and 4 must be free in the child
        assert end > 4 or not os.set_inheritable(end, False)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        script = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", path, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Page(to_browser[1], from_browser[0])
        finally:
            process.terminate()
            process.wait(30)
            os.close(to_browser[1])
            os.close(from_browser[0])
