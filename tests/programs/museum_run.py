"""Go on with a run of the museum from its checkpoint, by the code that lies there; print the losses of its steps.

Arguments: the folder of the run, and one for what the run writes.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def train(model: torch.nn.Module, output: Path, run: dict, checkpoint: Path | None = None) -> list[float]:
    """The loss of each step of a run, or of the steps after a checkpoint."""
    plain = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(output), **run["arguments"], **plain)
    losses: list[float] = []
    model.register_forward_hook(lambda module, inputs, found: losses.append(found["loss"].item()))
    # The first label is never predicted, and not every version of transformers leaves it out of the count.
    rows = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in run["rows"]]
    Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return losses


def main(folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    losses = train(model, output, json.loads((folder / "run.json").read_text()), checkpoint)
    assert "blockformer" not in sys.modules
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
