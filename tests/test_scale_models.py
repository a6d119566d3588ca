"""The models of `scale_steps.py`: the ordinary run has every kind of attention, feed-forward and positions."""

import pytest
import scale_steps
import torch

import blockformer

FIELDS = (
    "position_type relative_bias_per_layer qk_norm attention_gate attention_sinks clip_qkv attn_logit_softcapping "
    "gated_mlp mlp_bias residual norm_placement decoder_norm_placement num_hidden_groups share_embeddings expert_bias "
    "router_score router_selection_bias shared_expert_gate kv_lora_rank num_expert_groups"
).split()
ABSENT = {None, False, ""}


def kinds_of(config):
    """What a config has of attention, feed-forward and positions, as names with values."""
    kinds = {(name, value) for name in FIELDS if (value := getattr(config, name, None)) not in ABSENT}
    held = {
        "one key/value head": config.num_key_value_heads == 1,
        "a window": "sliding_attention" in config.layer_types,
        "layers without rotation": not all(getattr(config, "rope_layers", None) or [True]),
        "narrow embeddings": config.embedding_size != config.hidden_size,
        "experts": bool(getattr(config, "num_experts", 0)),
        "a shared expert": bool(getattr(config, "shared_expert_intermediate_size", 0)),
    }
    return kinds | {(name, True) for name, is_held in held.items() if is_held}


@pytest.fixture(scope="module")
def usual_kinds():
    with torch.device("meta"):
        return set().union(*(kinds_of(scale_steps.MODELS[name]().config) for name in scale_steps.USUAL))


@pytest.mark.parametrize("name", blockformer.PRESETS)
def test_the_ordinary_run_has_every_kind(usual_kinds, name):
    assert name in scale_steps.MODELS
    assert kinds_of(blockformer.preset(name)) <= usual_kinds
