"""Pairs of models with the same weights, ours and transformers', and what tests assert about them.

The weights are drawn with a large deviation, so that logits are peaky and different prompts give different text.
"""

import torch
from transformers import (
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
    theirs = official_model(family, ours)
    return ours, theirs


def official_model(family, ours, cls=None):
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
    theirs.load_state_dict(ours.state_dict())
    return theirs


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


def assert_close(ours, theirs, tolerance=1e-5):
    """Equal to 1e-5, absolute and relative (float32)."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
