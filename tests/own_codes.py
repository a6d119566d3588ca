"""Small official models, and their weights as training code names and orders them, written by programs of the tests."""

import torch
import transformers
from pairs import assert_close

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 50_000.0}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
OFFICIAL = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 8, "rope_parameters": ROPE}),
    "qwen2": ("Qwen2", {"rope_parameters": ROPE, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": ROPE}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}, "hidden_act": "gelu"}),
    "phi": ("Phi", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "hidden_act": "gelu_new"}),
}
IDS = torch.arange(3, 23)[None] % SIZES["vocab_size"]


def official(family, **more):
    """A small official language model with random weights, of which each is different."""
    name, special = OFFICIAL[family]
    sizes = {**SIZES, "hidden_size": 64} if family in ("gpt_neox", "phi") else SIZES
    sizes = {**sizes, "num_key_value_heads": 4} if family == "phi" else sizes
    sizes = {name: size for name, size in sizes.items() if family != "gpt_neox" or name != "num_key_value_heads"}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **special, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def side_by_side(tensor, heads):
    """Rows with the rotated pairs of each head side by side, of rows with all first ones first."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def assert_same(model, folder):
    """The official model in a folder has these weights, bit for bit, and computes the same."""
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert type(other) is type(model)
    mine, its = model.state_dict(), other.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    with torch.no_grad():
        assert_close(other(IDS).logits, model(IDS).logits, 1e-5)
