"""A headless Chromium, driven through its debugging pipe: neither a driver program nor a package is needed for that."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

WIDTH, HEIGHT = 1240, 900
SECONDS_MAX = 60.0  # for any answer
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium reads commands from descriptor 3 and answers on descriptor 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    f"--window-size={WIDTH},{HEIGHT}",
    "--remote-debugging-pipe",
)
KEYS = {"+": 187, "-": 189, "0": 48, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def need_browser() -> str:
    """As `find_browser`. Skips the test if there is none, and fails it with OFFLOAD_REQUIRE_BROWSER=1."""
    program = find_browser()
    if program is None and os.environ.get("OFFLOAD_REQUIRE_BROWSER") == "1":
        pytest.fail("OFFLOAD_REQUIRE_BROWSER=1, and there is no Chromium", pytrace=False)
    if program is None:
        pytest.skip("needs Chromium")
    return program


class Browser:
    """One Chromium with one page. `problems` are console messages and exceptions, `requests` what the page loaded."""

    def __init__(self, program: str, folder: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        numbers = [str(theirs_in), str(theirs_out)]
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            *numbers,
            program,
            *OPTIONS,
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # Chromium ends with the pipe
        try:
            self._process.wait(timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what is reported before it is noted."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path, *, dark: bool = False) -> None:
        """Load a page, in light or dark, and forget what the last one reported."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.problems.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._read()
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, *, button: str = "none", clicks: int = 0) -> None:
        """Send one event of the mouse, at a place of the window."""
        held = int(button == "left" and kind != "mouseReleased")
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=held, clickCount=clicks)

    def drag(self, path: Sequence[tuple[float, float]]) -> None:
        """Press the left button at the first place, move over the others, and release it at the last."""
        self.mouse("mouseMoved", *path[0])
        self.mouse("mousePressed", *path[0], button="left", clicks=1)
        for place in path[1:]:
            self.mouse("mouseMoved", *place, button="left")
        self.mouse("mouseReleased", *path[-1], button="left", clicks=1)
        self.settle()

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        about = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def photograph(self, path: Path) -> None:
        """Write what the whole page shows as a PNG."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    def _read(self) -> dict[str, Any]:
        """Return the next message, and note what it reports."""
        until = time.monotonic() + SECONDS_MAX
        while b"\0" not in self._unread:
            ready = select.select([self._in], [], [], max(until - time.monotonic(), 0.0))[0]
            more = os.read(self._in, 1 << 20) if ready else b""
            assert more, f"the browser does not answer (it ended with {self._process.poll()})"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        method, about = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" or (
            method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(about))
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        return message
