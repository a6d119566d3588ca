"""Pairs of models with the same weights, ours and transformers', and what tests assert about them.

The weights are drawn with a large deviation, so that logits are peaky and different prompts give different text.
"""

import copy
from collections.abc import Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import blockformer

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFICIAL = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
FAMILIES = tuple(OFFICIAL)
LATENT = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
}


def config(family="qwen3", **overrides):
    """A small config of a family."""
    settings = {**SIZES, **overrides}
    if family in ("qwen2", "qwen3", "llama"):
        settings.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0})
    if family == "qwen2":
        # Qwen2 has no field for the size of a head.
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    if family == "mistral":
        settings.setdefault("sliding_window", 16)
    return blockformer.preset(family, **settings)


def model(family="qwen3", seed=0, cls=blockformer.BlockformerDecoderForCausalLM, **overrides):
    """A small model of ours in evaluation mode."""
    torch.manual_seed(seed)
    return cls(config(family, **overrides)).eval()


def latent_pair(folder, family="deepseek_v3", **settings):
    """A model with latent attention of transformers, which it saves in the folder, and ours with the same weights."""
    config_class, model_class = LATENT[family]
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    sizes |= {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 40, "v_head_dim": 20}
    sizes |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "first_k_dense_replace": 3}
    torch.manual_seed(0)
    theirs = model_class(config_class(**{**sizes, **settings})).eval()
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder), theirs


def official_config(ours):
    """The official config, of the same settings, for one of our configs made by `config`."""
    shared = {name: getattr(ours, name) for name in SIZES if name != "head_dim"}
    shared |= {"rms_norm_eps": ours.norm_eps, "rope_parameters": dict(ours.rope_parameters)}
    shared |= {"tie_word_embeddings": ours.tie_word_embeddings, "attention_dropout": ours.attention_dropout}
    shared |= {"hidden_act": ours.hidden_act}
    return shared


def pair(family="qwen3", seed=0, **overrides):
    """Ours and transformers' model of one family, same weights, both in evaluation mode."""
    ours = model(family, seed, **overrides)
    theirs = official_copy(family, ours)
    return ours, theirs


def official_copy(family, ours, cls=None):
    """transformers' own model with the weights of ours."""
    config_class, model_class = OFFICIAL[family]
    settings = official_config(ours.config)
    if family != "qwen2":
        settings["head_dim"] = ours.config.head_dim
    if family in ("qwen2", "qwen3"):
        settings |= {"layer_types": list(ours.config.layer_types), "sliding_window": ours.config.sliding_window}
        settings["use_sliding_window"] = ours.config.sliding_window is not None
    if family == "mistral":
        settings["sliding_window"] = ours.config.sliding_window
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = ours.config.attention_bias
    if family == "llama":
        settings["mlp_bias"] = ours.config.mlp_bias
    theirs = (cls or model_class)(config_class(**settings)).eval()
    theirs.load_state_dict({official_name(name): tensor for name, tensor in ours.state_dict().items()})
    return theirs


def official_name(name):
    """The name in the Llama family's layout of one of our parameters."""
    name = name.replace(".self_attn_pre_norm.", ".input_layernorm.")
    return name.replace(".mlp_pre_norm.", ".post_attention_layernorm.")


def token_ids(batch, length, seed=0, vocab=VOCAB):
    """Random tokens [batch, length] that are not special."""
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch, length, seed=0):
    """Tokens [batch, length] and a mask in which each row but the first has padding on the left."""
    ids, mask = token_ids(batch, length, seed), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        gap = 1 + (3 * row) % (length - 1)
        ids[row, :gap], mask[row, :gap] = 0, 0
    return ids, mask


def train(a_model, ids, steps, rate):
    """The losses of so many steps of plain gradient descent on all that requires a gradient."""
    trained = [parameter for parameter in a_model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=rate), []
    for _ in range(steps):
        loss = a_model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


margins: list[float] = []
"""What `assert_close` found in the running test: each largest difference as a share of its bound."""


def assert_close(ours, theirs, tolerance=1e-5, at_least=0.0, name=""):
    """Equal to a share of the largest expected value, tensor by tensor.

    A sum rounds as its largest terms do. A logit of 0.1 in a row of forties carries the rounding of the forties, and
    another one on each processor, so the largest value is the yardstick for all. An absolute bound is too strict for
    large weights and blind with small ones. `test_pairs.py` shows the faults that this one sees.

    Args:
        ours: a tensor or number, or a list, tuple or dict of them.
        theirs: what is expected, of the same structure, dtypes and shapes; whole numbers must be equal.
        tolerance: the share; 1e-5 is 84 times the machine epsilon of float32.
        at_least: the size of the terms, where they cancel and the result may be anything down to 0.
        name: said in the error.

    Raises:
        AssertionError: they differ by more.
    """
    if isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys(), f"{name}only one has {sorted(ours.keys() ^ theirs.keys())}"
        for key, expected in theirs.items():
            assert_close(ours[key], expected, tolerance, at_least, f"{name}{key} ")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), f"{name}{len(ours)} instead of {len(theirs)}"
        for place, expected in enumerate(theirs):
            assert_close(ours[place], expected, tolerance, at_least, f"{name}{place} ")
    else:
        bound = tolerance * max(largest(theirs), at_least) if torch.as_tensor(theirs).is_floating_point() else 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound, msg=lambda text: name + text)
        if bound > 0:
            margins.append(largest(torch.as_tensor(ours) - torch.as_tensor(theirs)) / bound)


def assert_gradients_close(ours, theirs, tolerance=1e-5):
    """The same for gradients or weights by name, none held to less than a tenth of that share of the largest of all.

    A key's bias moves all scores of a row alike, and a softmax does not see it: its gradient is 0, and what is computed
    is rounding alone.
    """
    assert_close(ours, theirs, tolerance, at_least=0.1 * max(largest(gradient) for gradient in theirs.values()))


def assert_as_exact(ours, theirs, exact, times=4):
    """No further from the result of float64 than `times` as far as transformers: the sharpest yardstick, for a tensor.

    Right models differ from float64 alike; an epsilon of 1e-5 in place of 1e-6 moves ours 9 times as far at least.
    """
    assert (ours.isfinite() | ~exact.isfinite()).all(), "not finite where the exact result is"
    error, usual = (largest(found.double() - exact) for found in (ours, theirs))
    assert error <= times * usual, f"{error:.1e} from the exact result; the reference is {usual:.1e} from it"
    margins.append(error / (times * usual))


@contextmanager
def in_float64(model):
    """A copy of a model that computes in float64, what models compute in float32 whatever their dtype included."""
    cast = torch.Tensor.to

    def widened(tensor, *arguments, **settings):
        arguments = [torch.float64 if argument is torch.float32 else argument for argument in arguments]
        settings = {name: torch.float64 if value is torch.float32 else value for name, value in settings.items()}
        return cast(tensor, *arguments, **settings)

    wide = copy.deepcopy(model).double()
    with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch.Tensor, "to", widened):
        yield wide


def largest(values):
    """The largest finite absolute value; 0 if there is none."""
    values = torch.as_tensor(values).detach().double()
    values = values[values.isfinite()].abs()
    return values.max().item() if values.numel() else 0.0


def keep_padding(patch):
    """Have prepared stacks compute padding too: the plain way, which a run without padding is compared with."""
    patch.setattr(blockformer.engine.runtime, "find_unpadding", lambda *arguments: None)
