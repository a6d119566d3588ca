"""Peak memory: the resident size of a process, sampled while it works."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import psutil

INTERVAL = 0.002
"""Seconds between two samples."""


class Peak:
    """The largest resident size of this process inside a `with`; bytes.

    Attributes:
        before: resident before the work.
        peak: the largest of all samples, never below `before`.
    """

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self.before = self.peak = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, self._process.memory_info().rss)


def peak_of_command(command: list[str]) -> int:
    """Run a command to its end; the largest resident size of its process, in bytes.

    Raises:
        RuntimeError: the command fails.
    """
    child = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    try:
        while child.poll() is None:
            try:
                peak = max(peak, child.memory_info().rss)
            except psutil.Error:  # it has just ended
                break
            time.sleep(INTERVAL)
    except BaseException:
        child.kill()
        raise
    errors = child.communicate()[1]
    if child.returncode:
        raise RuntimeError(f"{command} failed:\n{errors}")
    return peak


def run_python(arguments: list[str]) -> dict:
    """Run a script in a process of its own; the JSON of the last line that it prints.

    Raises:
        RuntimeError: it fails.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
