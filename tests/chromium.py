"""A headless Chromium through the WebDriver protocol: as much of it as the tests need, by the standard library."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
MISSING = "Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
TAB, ENTER, LEFT, RIGHT, DOWN = "\ue004", "\ue007", "\ue012", "\ue014", "\ue015"


class Browser:
    """One window. `run` evaluates JavaScript in the page; `log` gives what the console has said since it was asked."""

    def __init__(self, folder):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.process = subprocess.Popen(
            [DRIVER, f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [f"--user-data-dir={folder}", "--window-size=1280,1000"]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        end = time.monotonic() + 60
        while True:
            try:
                made = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end or self.process.poll() is not None:
                    self.process.kill()
                    raise
                time.sleep(0.1)
        self.session = f"/session/{made['sessionId']}"

    def ask(self, method, path, content=None):
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"].splitlines()[0]) from error

    def open(self, path):
        self.ask("POST", f"{self.session}/url", {"url": path.absolute().as_uri()})

    def run(self, code, *arguments):
        return self.ask("POST", f"{self.session}/execute/sync", {"script": code, "args": list(arguments)})

    def wait(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < end, code
            time.sleep(0.05)
        return value

    def press(self, *keys):
        events = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions = {"actions": [{"type": "key", "id": "keys", "actions": events}]}
        self.ask("POST", f"{self.session}/actions", actions)

    def point(self, selector, x, y):
        """Move the mouse to a place in an element, in pixels from its left upper corner."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        frame = self.run(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.left, r.top]", selector
        )
        move = {"type": "pointerMove", "x": round(frame[0] + x), "y": round(frame[1] + y), "duration": 0}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self.ask("POST", f"{self.session}/actions", {"actions": [pointer]})

    def log(self):
        return self.ask("POST", f"{self.session}/se/log", {"type": "browser"})

    def devtools(self, command, **parameters):
        return self.ask("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def dark(self, wanted):
        feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def width(self, pixels):
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=pixels < 500
        )

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.ask("GET", f"{self.session}/screenshot")))

    def close(self):
        try:
            self.ask("DELETE", self.session)
        finally:
            self.process.terminate()
            self.process.wait(20)
