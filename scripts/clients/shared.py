"""What the clients' scripts share: where the models are, and a line of JSON for each job done with both.

Importing it puts `blockformer` out of reach: a repo must do with the code that it carries.
"""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
warnings.filterwarnings("ignore")

MODELS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
TRUST = {"trust_remote_code": True}
TEXTS = [
    "def heappush(heap, item):",
    "Insert item x in list a, and keep it sorted assuming a is sorted.",
    "import re",
    "class TextWrapper: Object for wrapping or filling text.",
    "The optional arguments lo and hi default to the beginning and the end of the list.",
    "Pop the smallest item off the heap, maintaining the heap invariant.",
    "If x is already in a, insert it to the right of the rightmost x.",
    "return result",
]


class _Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "blockformer":
            raise ModuleNotFoundError(f"{name} is out of reach in this process, on purpose", name=name)


sys.meta_path.insert(0, _Refuse())


def report(client: str, job: str, ours: str, theirs: str, same: bool | None, note: str = "") -> None:
    """Print one row of the table: what came of a job with our model and with transformers' own; whose fault it is."""
    row = {"client": client, "version": metadata.version(client), "job": job}
    print(json.dumps({**row, "ours": ours, "theirs": theirs, "same": same, "note": note}), flush=True)


def compare(
    client: str,
    job: str,
    model: str,
    run: Callable[[str], object],
    tolerance: float = 1e-4,
    note: str = "",
) -> None:
    """Do a job with both models and report.

    Args:
        client: the name of the client's distribution.
        job: what is done.
        model: a name of `models.MODELS`.
        run: does the job with the model of a folder and returns tensors, numbers and texts, in lists and dicts.
        tolerance: by which results may differ, as a share of the largest number of a tensor.
        note: whose fault it is where the job fails or gives something else.
    """
    import torch

    results: list = []
    for folder in (MODELS / model, MODELS / f"{model}-official"):
        torch.manual_seed(0)
        try:
            # Progress and logs of the clients would be taken for rows.
            with contextlib.redirect_stdout(sys.stderr):
                results.append(run(str(folder)))
        except Exception as error:
            results.append(error)
    said = [_said(result) for result in results]
    if any(isinstance(result, Exception) for result in results):
        report(client, f"{job}: {model}", *said, None if said[0] != "works" and said[1] != "works" else False, note)
        return
    worst, unequal = 0.0, ""
    for ours, theirs in zip(*(list(_leaves(result)) for result in results), strict=True):
        if isinstance(ours, torch.Tensor) and ours.shape == theirs.shape:
            scale = theirs.abs().max().clamp(min=1.0) if theirs.numel() else torch.tensor(1.0)
            worst = max(worst, ((ours - theirs).abs().max() / scale).item() if theirs.numel() else 0.0)
        elif isinstance(ours, torch.Tensor) or ours != theirs:
            unequal = f"{str(ours)[:60]} / {str(theirs)[:60]}"
    same = worst <= tolerance and not unequal
    found = unequal or f"largest difference {worst:.1e}"
    report(client, f"{job}: {model}", *said, same, note if note and not same else found)


def _said(result: object) -> str:
    if not isinstance(result, Exception):
        return "works"
    lines = str(result).strip().splitlines() or [""]
    return f"{type(result).__name__}: {lines[0][:160]}"


def _leaves(value: object) -> Iterable:
    """Every tensor (as float64), number (as a tensor) and text in nested lists and dicts."""
    import torch

    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor):
        yield value.detach().double()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield torch.tensor(float(value), dtype=torch.float64)
    else:
        yield value
