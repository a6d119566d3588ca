"""What `accelerate launch` runs in `test_scale.py`: some steps of `Trainer`, resumed where there is a checkpoint."""

import json
import sys
from pathlib import Path

import torch
from pairs import config, token_ids
from transformers import Trainer, TrainingArguments

import blockformer


def main(folder: Path, steps: int) -> None:
    """Train up to so many steps; the first process writes the losses and the whole weights."""
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(
        config("qwen3", tie_word_embeddings=True, num_hidden_layers=2, initializer_range=0.2)
    )
    rows = [{"input_ids": row, "labels": row} for row in token_ids(16, 12)]
    world = TrainingArguments(folder, use_cpu=True, report_to=[]).world_size
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4 // world,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[blockformer.StopOnNonFiniteLoss()])
    resumed = blockformer.last_complete_checkpoint(folder)
    trainer.train(resume_from_checkpoint=resumed)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        torch.save({name: weight.cpu().clone() for name, weight in state.items()}, folder / f"weights-{steps}.pt")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        kind = str(trainer.accelerator.distributed_type)
        answer = {"losses": losses, "resumed": resumed, "kind": kind, "world": arguments.world_size}
        (folder / f"answer-{steps}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
