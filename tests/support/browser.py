"""A real browser without a driver: Chromium's own protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60
KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip
# Chromium reads commands from 3 and answers on 4, whatever numbers the pipes have here.
_HAND_OVER = """import os, sys
ends = [os.dup(os.dup(int(end))) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])"""


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium here; apt-get install chromium"
)


class Page:
    """One tab; `requests` and `complaints` collect what it asked for and what it wrote."""

    def __init__(self, send, receive) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send(message)
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _note(self, event) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Page.loadEventFired":
                self._loaded = True

    def open(
        self, place: Path | str, *, width: int, height: int = 800,
        dark: bool = False, still: bool = False, fresh: bool = True,
    ) -> None:  # fmt: skip
        """Load a file or an address as a screen of this size would show it.

        A `fresh` browser remembers nothing of earlier pages.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2, mobile=width < 600,
        )  # fmt: skip
        likes = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in likes.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        forget = "try { localStorage.clear(); } catch {}" if fresh else ""
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=forget)
        self._loaded = False
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._receive())
        self.call("Page.removeScriptToEvaluateOnNewDocument", **script)

    def ask(self, script: str):
        """The value of some JavaScript, awaited where it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str):
        """Wait for some JavaScript to be true, and give its value."""
        found = self.ask(
            f"""new Promise((resolve) => {{
              const end = performance.now() + {1000 * _SECONDS};
              (function look() {{
                const value = ({script});
                if (value || performance.now() > end) resolve(value);
                else setTimeout(look, 5);
              }})();
            }})"""
        )
        assert found, f"never true: {script}\nthe page says: {self.ask('document.body.innerText')}"
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key of the keyboard."""
        typed = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key, 0)
        both = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=typed, **both)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def middle(self, selector: str) -> dict[str, float]:
        """Where an element is, once scrolled into sight."""
        name = json.dumps(selector)
        x, y = self.ask(
            f"""(async () => {{
              for (const _ of [1, 2]) await new Promise(requestAnimationFrame); // it moved last
              const e = document.querySelector({name});
              e.scrollIntoView({{block: 'center', behavior: 'instant'}});
              const b = e.getBoundingClientRect();
              return [b.left + b.width / 2, b.top + b.height / 2];
            }})()"""
        )
        return {"x": x, "y": y}

    def point(self, selector: str) -> None:
        """The mouse moves over an element."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self.middle(selector))

    def click(self, selector: str) -> None:
        """The mouse clicks an element."""
        both = {"button": "left", "clickCount": 1, **self.middle(selector)}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **both)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **both)

    def tap(self, selector: str) -> None:
        """A finger taps an element."""
        where = self.middle(selector)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[where])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def picture(self, path: Path) -> Path:
        """The whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path


@contextmanager
def browsing(folder: Path):
    """A page of a fresh browser whose profile lies in `folder`."""
    program = find_browser()
    assert program is not None
    to_read, write_end = os.pipe()
    read_end, to_write = os.pipe()
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip

    process = subprocess.Popen(
        [sys.executable, "-c", _HAND_OVER, str(to_read), str(to_write), *command],
        pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    pending = bytearray()

    def send(message) -> None:
        os.write(write_end, json.dumps(message).encode() + b"\0")

    def receive():
        while b"\0" not in pending:
            part = os.read(read_end, 1 << 16)
            assert part, "the browser has gone"
            pending.extend(part)
        line, _, rest = bytes(pending).partition(b"\0")
        pending[:] = rest
        return json.loads(line)

    try:
        yield Page(send, receive)
    finally:
        os.close(write_end)
        os.close(read_end)
        process.terminate()
        process.wait(timeout=_SECONDS)
