"""Hundreds of steps of `Trainer` with warm-up, clipping and a schedule: the losses that transformers' models have.

Both start from the same weights and see the same batches. A step that differs a little shows after many: AdamW carries
it on. How far two right runs come apart depends on the processor, so the yardstick is how far transformers' model comes
apart from itself when it computes in another order.
"""

import pytest
import torch
import transformers
from pairs import margins
from transformers import Trainer, TrainerCallback, TrainingArguments

import blockformer

VOCAB, LENGTH, ROWS, BATCH, RATE = 97, 12, 48, 8, 3e-3
_USUAL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {**_USUAL, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "decoder_start_token_id": 2, "init_std": 0.1,
}  # fmt: skip
# The official class of each, with the settings of its config.
FAMILIES = {
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        {**_WIDE, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1},
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {**_USUAL, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.1}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "bert": (
        transformers.BertForMaskedLM,
        {**_WIDE, **_DRY, "max_position_embeddings": 32, "initializer_range": 0.1},
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        {**_USUAL, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
    "bart": (transformers.BartForConditionalGeneration, {**_USUAL, **_BART}),
}
CASES = [
    pytest.param(name, steps, id=f"{name}-{steps}", marks=[] if is_usual else pytest.mark.exhaustive)
    for name, steps, is_usual in [
        *((name, 12, name in ("qwen3", "bert", "t5")) for name in FAMILIES),
        *((name, 300, False) for name in FAMILIES),
    ]
]


def rows_of(name):
    """Rows with as many labels each: next tokens, three masked ones, or a target. Padding stands at the end only."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if name in ("bert", "t5", "bart"):
        for number, row in enumerate(mask[1::3]):
            row[LENGTH - 1 - number % 3 :] = 0
    if name == "bert":
        labels = torch.full_like(ids, -100)
        for row, own in zip(ids, labels, strict=True):
            places = torch.randperm(LENGTH - 3, generator=generator)[:3]
            own[places], row[places] = row[places], 3
    elif name in ("t5", "bart"):
        labels = (ids[:, :7] * 5 + 3) % (VOCAB - 5) + 5
    else:  # `Trainer` counts a label of a first token for GPT-2, though nothing predicts it
        labels = ids.clone()
        labels[:, 0] = -100
    rows = zip(ids, mask, labels, strict=True)
    return [{"input_ids": each, "attention_mask": seen, "labels": own} for each, seen, own in rows]


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Runs:
    """Runs of one family from the same weights, with the same batches.

    Args:
        folder: an empty one.
        steps: of the whole run.
    """

    def __init__(self, name, folder, steps):
        self.name, self.folder, self.steps = name, folder, steps
        self.official, settings = FAMILIES[name]
        torch.manual_seed(0)
        model = self.official(self.official.config_class(**settings))
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() == 1 or "relative_attention_bias" in key:
                    weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder / "src")

    def ours(self, checkpointed=False, **settings):
        model = blockformer.from_official(self.folder / "src")
        if checkpointed:
            model.gradient_checkpointing_enable()
        return self.losses(model, **settings)

    def theirs(self, attention="sdpa", **settings):
        return self.losses(
            self.official.from_pretrained(self.folder / "src", attn_implementation=attention), **settings
        )

    def losses(self, model, stop=None, resume=None, **settings):
        """The loss of each step, float64 [steps]."""
        usual = {"per_device_train_batch_size": BATCH, "learning_rate": RATE, "weight_decay": 0.1, "max_grad_norm": 1.0}
        usual |= {"warmup_steps": self.steps // 6, "lr_scheduler_type": "cosine", "optim": "adamw_torch", "seed": 3}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
        quiet |= {"dataloader_pin_memory": False, "max_steps": self.steps}
        arguments = TrainingArguments(str(self.folder / "run"), **{**usual, **quiet, **settings})
        callbacks = [StopAt(stop)] if stop else []
        trainer = Trainer(model, arguments, train_dataset=rows_of(self.name), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        rates = [entry["learning_rate"] for entry in logged]
        assert max(entry["grad_norm"] for entry in logged) > 1.0  # something was clipped
        assert rates[0] < rates[self.steps // 6] == max(rates)  # warmed up
        assert stop or rates[-1] < RATE / 10
        assert len(logged) == (stop or self.steps)
        return torch.tensor([entry["loss"] for entry in logged], dtype=torch.float64)


def assert_learnt(losses):
    """The last pass over the rows has a smaller loss than the first, after many steps a much smaller one."""
    rows = ROWS // BATCH
    assert losses[-rows:].mean() < losses[:rows].mean() * (0.98 if len(losses) < 100 else 0.6)


def assert_within(found, expected, spread, times, at_least):
    """Losses that come apart by no more than `times` the spread, on average and at most; shares of the first loss."""
    apart = (found - expected).abs() / expected[0]
    for measure in (torch.mean, torch.max):
        bound = max(times * measure(spread).item(), at_least)
        assert measure(apart).item() <= bound, f"{measure(apart):.1e}, and {bound:.1e} is allowed"
        margins.append(measure(apart).item() / bound)


def spread_of(one, other):
    return (one - other).abs() / one[0]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "steps"), CASES)
def test_float32_plain_accumulated_checkpointed_and_resumed(tmp_path, name, steps):
    """A step of four accumulated batches is one of a whole batch, and a resumed run one that nobody stopped."""
    runs = Runs(name, tmp_path, steps)
    theirs = runs.theirs()
    spread = spread_of(theirs, runs.theirs("eager"))
    assert_learnt(theirs)
    plain = runs.ours()
    ways = {
        "plain": plain,
        "accumulated": runs.ours(per_device_train_batch_size=BATCH // 4, gradient_accumulation_steps=4),
        "checkpointed": runs.ours(checkpointed=True),
    }
    for found in ways.values():
        assert_within(found, theirs, spread, times=4, at_least=2e-6)
    saving = {"save_strategy": "steps", "save_steps": steps // 2}
    first = runs.ours(stop=steps // 2, **saving)
    resumed = runs.ours(resume=str(tmp_path / "run" / f"checkpoint-{steps // 2}"), **saving)
    assert torch.equal(first, plain[: steps // 2])
    assert torch.equal(resumed, plain)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "steps"), CASES)
def test_bfloat16_autocast(tmp_path, name, steps):
    """As near to transformers' losses as those are to each other with another attention function."""
    runs = Runs(name, tmp_path, steps)
    theirs = runs.theirs(bf16=True)
    spread = spread_of(theirs, runs.theirs("eager", bf16=True))
    assert_learnt(theirs)
    assert spread.max() > 1e-5  # it was autocast
    assert_within(runs.ours(bf16=True), theirs, spread, times=3, at_least=1e-6)
