"""On an accelerator: no waiting for its values, no tensor of another device, no float64; and other default devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pairs import model, token_ids

SCRIPT = Path(__file__).with_name("fake_device.py")
EXPECTED = 73
# A loss in chunks selects the labelled tokens, whose number it has to know.
WAITS = "loss in chunks"


def complaints(*arguments):
    """What `fake_device.py` finds wrong, by case."""
    run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_nothing_waits_for_an_accelerator():
    found = complaints()
    assert len(found) == EXPECTED
    wrong = {case: what for case, what in found.items() if what and WAITS not in case}
    assert not wrong, json.dumps(wrong, indent=1)
