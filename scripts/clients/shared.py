"""What the clients' scripts share: where the models are, and a line of JSON for each job done with both.

Importing it puts `blockformer` out of reach: a repo must do with the code that it carries.
"""

import contextlib
import json
import math
import os
import re
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


def report(
    client: str, job: str, model: str, ours: str, theirs: str, difference: float = 0.0, unequal: str = ""
) -> None:
    """Print a row: the results of a job with our model and with transformers' own. `judging.py` judges them.

    Args:
        client: the name of the client's distribution.
        difference: the largest one of their numbers, infinite where anything else differs: then `unequal` shows it.
    """
    row = {"client": client, "version": metadata.version(client), "job": job, "model": model}
    print(json.dumps({**row, "ours": ours, "theirs": theirs, "difference": difference, "unequal": unequal}), flush=True)


def compare(client: str, job: str, model: str, run: Callable[[str], object]) -> None:
    """Do a job with both models and report.

    Args:
        client: the name of the client's distribution.
        job: what is done.
        model: a name of `models.MODELS`.
        run: does the job with the model of a folder and returns tensors, numbers and texts, in lists and dicts.
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
        report(client, job, model, *said)
    else:
        report(client, job, model, *said, *difference_of(*results))


def difference_of(ours: object, theirs: object) -> tuple[float, str]:
    """The largest difference of numbers, as a share of the largest number of their tensor, or infinity and what it is.

    Numbers below 1 are compared as they are. Not-a-numbers differ from everything.
    """
    import torch

    worst, leaves = 0.0, [list(_leaves(each)) for each in (ours, theirs)]
    if len(leaves[0]) != len(leaves[1]):
        return math.inf, f"{len(leaves[0])} results / {len(leaves[1])}"
    for one, other in zip(*leaves, strict=True):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if both and one.shape == other.shape:
            if other.numel():
                share = ((one - other).abs().max() / other.abs().max().clamp(min=1.0)).item()
                worst = max(worst, math.inf if math.isnan(share) else share)
        elif both or one != other:
            return math.inf, f"{str(one)[:60]} / {str(other)[:60]}"
    return worst, "not a number" if worst == math.inf else ""


def _said(result: object) -> str:
    if not isinstance(result, Exception):
        return "works"
    lines = str(result).strip().splitlines() or [""]
    text = re.sub(r"/\S*/\S*: ", "", lines[0])  # a folder of this run
    return f"{type(result).__name__}: {text[:160]}"


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
