"""Muon for the matrices of the layers and AdamW for the rest: who has what, their steps, and `Trainer` with both."""

import copy
from itertools import chain

import pytest
import torch
from narrow_models import USUALLY, arguments, models_of, of_width, small
from pairs import model, token_ids
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, set_seed

import blockformer
from blockformer import muon

LM = blockformer.BlockformerDecoderForCausalLM
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


def shares_of(a_model, optimizer):
    """The names that Muon has, and those that AdamW has."""
    names = {parameter: name for name, parameter in a_model.named_parameters()}
    groups = [[names[each] for each in group["params"]] for group in optimizer.param_groups]
    return tuple(list(chain(*part)) for part in (groups[: optimizer.of_muon], groups[optimizer.of_muon :]))


@needs_muon
@pytest.mark.parametrize("preset", USUALLY)
def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(preset):
    for a_model in models_of(small(preset)):
        matrices, rest = shares_of(a_model, muon(a_model, 1e-2, 0.1))
        assert sorted(matrices + rest) == sorted(name for name, _ in a_model.named_parameters())
        assert all(name.endswith(".weight") and ".layers." in f".{name}" for name in matrices)
        assert all(name.split(".")[-2].endswith("_proj") for name in matrices)
        linear = {name for name, each in a_model.named_modules() if isinstance(each, nn.Linear)}
        left = {name.removesuffix(".weight") for name in rest if name.endswith(".weight")} & linear
        assert not any("layers." in name for name in left if not name.endswith("shared_expert_gate")), left


@needs_muon
def test_stacked_experts_and_routers_are_adamws():
    a_model = LM(of_width("qwen2_moe", 16))
    matrices, rest = shares_of(a_model, muon(a_model, 1e-2, 0.1))
    assert {"experts.gate_up_proj", "experts.down_proj", "gate.weight", "shared_expert_gate.weight"} <= {
        name.partition(".mlp.")[2] for name in rest
    }
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in matrices


@needs_muon
def test_its_steps_are_those_of_both_optimizers():
    """Beside torch's two, each over its own parameters; with a closure, and with weights that got no gradient."""
    ours, theirs = model(num_hidden_layers=1), model(num_hidden_layers=1)
    optimizer = muon(ours, 1e-2, 0.1, momentum=0.9, betas=(0.8, 0.9), eps=1e-6)
    matrices, rest = ([dict(theirs.named_parameters())[name] for name in names] for names in shares_of(ours, optimizer))
    by_torch = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [each for each in rest if each.dim() == 2], "weight_decay": 0.1},
                {"params": [each for each in rest if each.dim() == 1], "weight_decay": 0.0},
            ],
            lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=True,
        ),
    ]  # fmt: skip
    ids = token_ids(4, 12)

    def closure():
        optimizer.zero_grad()
        loss = ours(ids, labels=ids).loss
        loss.backward()
        return loss

    for _ in range(3):
        expected = theirs(ids, labels=ids).loss
        expected.backward()
        for each in by_torch:
            each.step()
            each.zero_grad()
        assert torch.equal(optimizer.step(closure), expected)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name


@needs_muon
@pytest.mark.parametrize("width", [16, 32, 64])
def test_a_step_at_another_width_has_its_due_spectral_norm(width):
    """sqrt(outputs / inputs), in the same proportion at every width; AdamW's weights have the rates of muP."""
    base = of_width("qwen3", 16)
    a_model = blockformer.mup_model(LM, of_width("qwen3", width), base)
    optimizer = muon(a_model, 1.0, 0.1, base=base)
    growth = width / 16
    for group in optimizer.param_groups[: optimizer.of_muon]:
        assert group["lr"] == growth**-0.5
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.1)
    rates = [group["lr"] for group in optimizer.param_groups[optimizer.of_muon :] if group["params"]]
    assert rates == ([1.0, 1 / growth, 1.0] if growth > 1 else [1.0, 1.0])


@needs_muon
@pytest.mark.parametrize("preset", ["qwen3", "qwen3_moe", "bert", "t5"])
def test_trainer_goes_on_from_a_checkpoint_bit_for_bit(preset, tmp_path):
    """With a schedule, clipped gradients and a base; the checkpoint holds the states of both."""
    base, config = (of_width(preset, width) for width in (16, 32))
    model_class = next(type(each) for each in models_of(config) if "ForCausalLM" in type(each).__name__ or
                       "ForMaskedLM" in type(each).__name__ or "Conditional" in type(each).__name__)  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in token_ids(32, 12, 0, 61)]

    def run(folder, resume=None):
        set_seed(0)
        a_model = blockformer.mup_model(model_class, config, base)
        own = arguments(folder, max_steps=6, per_device_train_batch_size=4, lr_scheduler_type="cosine", warmup_steps=2)
        own.save_strategy, own.save_steps = "steps", 3
        trainer = Trainer(a_model, own, train_dataset=rows, optimizers=(muon(a_model, 1e-2, 0.1, base=base), None))
        trainer.train(resume_from_checkpoint=resume)
        return a_model.state_dict(), trainer.optimizer.state_dict()

    whole, resumed = run(tmp_path), run(tmp_path, str(tmp_path / "checkpoint-3"))
    start = blockformer.mup_model(model_class, config, base).state_dict()
    for name, weight in whole[0].items():
        assert torch.equal(weight, resumed[0][name]), name
    assert any(not torch.equal(weight, start[name]) for name, weight in whole[0].items() if "q_proj" in name)
    states = whole[1]["state"], resumed[1]["state"]
    kinds = {frozenset(state) for state in states[0].values()}
    assert kinds == {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())


@needs_muon
def test_a_loaded_state_is_the_one_that_steps():
    a_model = model(num_hidden_layers=1)
    ids = token_ids(4, 12)
    a_model(ids, labels=ids).loss.backward()
    first = muon(a_model, 1e-2, 0.1)
    first.step()
    twin = copy.deepcopy(a_model)
    for parameter, its in zip(twin.parameters(), a_model.parameters(), strict=True):
        parameter.grad = its.grad.clone()
    second = muon(twin, 0.5, 0.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.step()
    second.step()
    for name, weight in a_model.state_dict().items():
        assert torch.equal(weight, twin.state_dict()[name]), name


@needs_muon
def test_adapters_and_a_repos_own_code_have_layers_too():
    """What matters is where a linear layer stands, not whose class it is."""
    wrapped = get_peft_model(model("qwen2", num_hidden_layers=1), LoraConfig(r=2, task_type="CAUSAL_LM"))
    matrices, rest = shares_of(wrapped, muon(wrapped, 1e-2, 0.1))
    assert matrices
    assert all("lora_" in name for name in matrices)
    assert not rest


def test_what_muon_cannot_train_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(torch.optim, "Muon", raising=False)
        with pytest.raises(
            ImportError, match=rf"Muon came with torch 2.9, and this is torch .*{torch.__version__[:4]}"
        ):
            muon(nn.Linear(2, 2), 1e-3, 0.1)
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ValueError, match=r"Linear has no matrices in `layers` that Muon could train: use adamw"):
            muon(nn.Linear(2, 2), 1e-3, 0.1)
        with pytest.raises(ValueError, match="weight_decay must be 0 or more and finite, not -1"):
            muon(model(), 1e-3, -1)
