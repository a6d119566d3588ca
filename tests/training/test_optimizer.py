"""Parameter groups and AdamW: those of `Trainer`, for every preset and head; and the snippets of docs/training.md."""

import functools
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from narrow_models import USUALLY, arguments, models_of, names_of, small
from pairs import assert_close, model, token_ids
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import blockformer
from blockformer import adamw, optimizer_groups
from blockformer.presets import PRESETS

WITH_SINKS = {"gpt_oss", "flint", "granite_swa", "granitemoe_swa"}
WITH_SINKS |= {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini", "olmo_hybrid", "apertus"}
WITH_SINKS |= {"bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"}
"""Presets with attention sinks, or decays of a state or numbers of an activation, which decay by `Trainer`."""
GUIDE = Path(__file__).parents[2] / "docs/training.md"


def assert_groups_of_trainer(a_model, folder):
    """The same parameters in the same order, so that an optimizer state of the one fits the other."""
    groups = optimizer_groups(a_model, 0.3)
    expected = Trainer(a_model, arguments(folder, weight_decay=0.3)).create_optimizer().param_groups
    assert names_of(a_model, groups) == names_of(a_model, expected)
    assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in expected] == [0.3, 0.0]
    return names_of(a_model, groups)


# The groups


@pytest.mark.versions
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=[] if preset in USUALLY else pytest.mark.exhaustive)
        for preset in sorted(set(PRESETS) - WITH_SINKS)
    ],
)
def test_every_preset_and_head_has_the_groups_of_trainer(preset, tmp_path):
    for a_model in models_of(small(preset)):
        decaying, others = assert_groups_of_trainer(a_model, tmp_path)
        assert sorted(decaying + others) == sorted(name for name, _ in a_model.named_parameters())
        sizes = {name: parameter.dim() for name, parameter in a_model.named_parameters()}
        assert all(sizes[name] >= 2 for name in decaying)
        assert all(sizes[name] == 1 or "bias" in name for name in others)


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_a_relative_bias_does_not_decay(settings, tmp_path):
    a_model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(small("t5", **settings))
    decaying, others = assert_groups_of_trainer(a_model, tmp_path)
    biases = [f"model.{side}.relative_bias.embedding.weight" for side in ("encoder", "decoder")]
    assert set(biases) <= set(others)
    assert ("lm_head.weight" in decaying) is not settings["tie_word_embeddings"]


@pytest.mark.parametrize(
    "settings",
    [
        {"position_type": "relative_key_query", "rope_parameters": None},
        {"position_type": "learned", "rope_parameters": None, "norm_type": "layer_norm", "norm_placement": "post"},
        {"add_cross_attention": True, "lm_head_transform": True, "lm_head_bias": True, "embedding_norm": True},
    ],
)
def test_mixes_have_the_groups_of_trainer(settings, tmp_path):
    for a_model in models_of(small("qwen3", **settings)):
        assert_groups_of_trainer(a_model, tmp_path)


def test_what_is_tied_is_there_once_and_what_is_frozen_is_not(tmp_path):
    a_model = model(tie_word_embeddings=True)
    a_model.model.layers[0].requires_grad_(False)
    decaying, others = assert_groups_of_trainer(a_model, tmp_path)
    assert "model.embed_tokens.weight" in decaying
    assert "lm_head.weight" not in decaying
    assert not any(".layers.0." in name for name in decaying + others)
    assert any(".layers.1." in name for name in others)
    parameters = [parameter for group in optimizer_groups(a_model, 0.1) for parameter in group["params"]]
    assert len(parameters) == len(set(parameters)) == sum(parameter.requires_grad for parameter in a_model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"bias": "all"},
        {"modules_to_save": ["norm", "lm_head"]},
    ],
    ids=["linear", "biases", "saved"],
)
def test_adapters_alone_are_trained(settings, tmp_path):
    wrapped = get_peft_model(model("qwen2", num_hidden_layers=1), LoraConfig(r=2, task_type="CAUSAL_LM", **settings))
    decaying, others = assert_groups_of_trainer(wrapped, tmp_path)
    assert any("lora_A" in name for name in decaying)
    assert not any("base_layer.weight" in name for name in decaying + others)
    assert bool(others) is ("target_modules" not in settings)


class Sharing(nn.Module):
    """A matrix under two names, and norms whose names do not say so."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.parts = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm((2, 4)))
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.norm = nn.Linear(4, 4)
        self.attention_norm = nn.Linear(4, 4)
        self.normalizer = nn.Linear(4, 4)
        self.RMSNorm_1 = nn.Linear(4, 4)
        self.LayerNorm_2 = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.zeros(3, 4))


@pytest.mark.parametrize(
    "module",
    [
        Sharing(),
        nn.Linear(3, 3),
        nn.Transformer(8, 2, 1, 1, 16),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.LayerNorm(4), nn.Embedding(5, 4)),
        nn.GRU(3, 4),
        nn.ParameterList([nn.Parameter(torch.zeros(2, 2))]),
    ],
    ids=lambda module: type(module).__name__,
)
def test_plain_modules_have_the_groups_of_trainer(module, tmp_path):
    assert_groups_of_trainer(module, tmp_path)


def test_a_vector_never_decays_whatever_its_name():
    """`Trainer` goes by names and lets these decay."""
    parts = OrderedDict(a=nn.RMSNorm(4), b=nn.PReLU(4), c=nn.BatchNorm1d(4), d=nn.RMSNorm((2, 4)), e=nn.Linear(4, 4))
    module = nn.Sequential(parts)
    assert names_of(module, optimizer_groups(module, 0.1)) == [
        ["e.weight"],
        ["a.weight", "b.weight", "c.weight", "c.bias", "d.weight", "e.bias"],
    ]
    assert {"a.weight", "b.weight", "c.weight", "d.weight"} <= set(Trainer.get_decay_parameter_names(None, module))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
)
@pytest.mark.parametrize("frozen", ["nothing", "vectors", "matrices"])
def test_any_optimizer_takes_the_groups(make, frozen):
    a_model = model(num_hidden_layers=1)
    for parameter in a_model.parameters():
        parameter.requires_grad_(frozen == "nothing" or (parameter.dim() == 1) is (frozen == "matrices"))
    before = {name: weight.clone() for name, weight in a_model.named_parameters()}
    optimizer = make(optimizer_groups(a_model, 0.1))
    ids = token_ids(2, 9)
    a_model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, weight in a_model.named_parameters():
        assert torch.equal(before[name], weight) is not weight.requires_grad, name


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_weight_decay_without_a_meaning_is_refused(wrong):
    for make in (optimizer_groups, functools.partial(adamw, learning_rate=1e-3)):
        with pytest.raises(ValueError, match=f"weight_decay must be 0 or more and finite, not {wrong}"):
            make(nn.Linear(2, 2), weight_decay=wrong)


@pytest.mark.parametrize("module", [model().requires_grad_(False), nn.Identity()], ids=["frozen", "empty"])
def test_a_model_without_trainable_parameters_is_refused(module):
    with pytest.raises(ValueError, match=f"{type(module).__name__} has no trainable parameters"):
        optimizer_groups(module, 0.1)


# AdamW


def test_only_matrices_shrink_without_a_gradient():
    a_model = model(num_hidden_layers=1)
    before = {name: weight.detach().clone() for name, weight in a_model.named_parameters()}
    optimizer = adamw(a_model, learning_rate=0.5, weight_decay=0.2)
    for parameter in a_model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, weight in a_model.named_parameters():
        torch.testing.assert_close(weight, before[name] * (0.9 if weight.dim() == 2 else 1.0))


def test_its_settings_arrive():
    optimizer = adamw(nn.Linear(2, 2), 3e-4, 0.2, betas=(0.8, 0.95), eps=1e-6)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (3e-4, (0.8, 0.95), 1e-6, True)
    assert optimizer.defaults["weight_decay"] == 0.2
    plain, standard = adamw(nn.Linear(2, 2), 1e-3, 0.0).defaults, torch.optim.AdamW([torch.zeros(1)]).defaults
    assert (plain["betas"], plain["eps"]) == (standard["betas"], standard["eps"])


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, dtype=torch.complex64)], ids=["device", "dtype"]
)
def test_plain_where_there_is_no_fused_kernel(module):
    assert all(group["fused"] is None for group in adamw(module, 1e-3, 0.1).param_groups)


def test_fused_and_plain_take_the_same_steps():
    fused, plain = model(), model()
    optimizers = adamw(fused, 1e-2, 0.1), torch.optim.AdamW(optimizer_groups(plain, 0.1), lr=1e-2, fused=False)
    ids = token_ids(4, 12)
    for _ in range(3):
        for a_model, optimizer in zip((fused, plain), optimizers, strict=True):
            optimizer.zero_grad()
            a_model(ids, labels=ids).loss.backward()
            optimizer.step()
    assert_close(fused.state_dict(), plain.state_dict())


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "t5"])
def test_trainer_and_a_loop_by_hand_end_with_the_same_weights(family, tmp_path):
    """Bit for bit: `Trainer`'s own optimizer, `Trainer` with ours, and a plain loop."""
    rows = [{"input_ids": token_ids(1, 12, seed, 61)[0]} for seed in range(12)]
    settings = {"learning_rate": 1e-2, "weight_decay": 0.2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"per_device_train_batch_size": 3, "max_steps": 4, "seed": 1}
    seen = []

    def collate(features):
        ids = torch.stack([row["input_ids"] for row in features])
        seen.append({"input_ids": ids, "labels": ids.clone()})
        return seen[-1]

    def make():
        torch.manual_seed(0)
        a_config = small(
            family,
            initializer_range=0.1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **({"activation_dropout": 0.0} if family == "t5" else {}),
        )
        return next(a_model for a_model in models_of(a_config) if a_model.can_generate())

    def run(optimizers=lambda a_model: (None, None), **more):
        a_model = make()
        own = arguments(tmp_path, **settings, **more)
        Trainer(a_model, own, train_dataset=rows, data_collator=collate, optimizers=optimizers(a_model)).train()
        return a_model.state_dict()

    theirs = run(optim="adamw_torch_fused")
    batches = seen[:4]
    ours = run(lambda a_model: (adamw(a_model, 1e-2, 0.2), None))
    by_hand = make().train()
    optimizer = adamw(by_hand, learning_rate=1e-2, weight_decay=0.2)
    for batch in batches:
        loss = by_hand(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    start = make().state_dict()
    for name, weight in by_hand.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
        assert torch.equal(weight, ours[name]), name
        assert not torch.equal(weight, start[name]), name


def test_a_state_of_trainers_optimizer_goes_on(tmp_path):
    a_model = model(num_hidden_layers=1)
    ids = token_ids(8, 9)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(a_model, arguments(tmp_path, max_steps=2, optim="adamw_torch_fused"), train_dataset=rows)
    trainer.train()
    optimizer = adamw(a_model, 1e-3, 0.0)
    optimizer.load_state_dict(trainer.optimizer.state_dict())
    for parameter in a_model.parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], trainer.optimizer.state[parameter]["exp_avg"])


# The guide


def test_the_snippets_of_the_guide_run(tmp_path, monkeypatch):
    """In their order and one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(snippets) >= 6
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, GUIDE.name, "exec"), names)
