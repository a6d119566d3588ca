"""Texts of 8,192 and 32,768 tokens in models of small width: the logits and the next tokens of transformers."""

import pytest
import torch
import transformers
from pairs import assert_close, pair, token_ids

import blockformer

VOCAB, NEAR, FAR = 199, 8192, 32768
NEW = 4


def rotary(rope_type, length):
    """Settings of rotary positions for a model whose training ended far before `length`."""
    trained = length // 4
    kinds = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": trained},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": trained},
        "longrope": {"factor": 4.0, "original_max_position_embeddings": trained}
        | {"short_factor": [1.0 + 0.1 * each for each in range(16)]}
        | {"long_factor": [2.0 + 0.3 * each for each in range(16)]},
    }
    whole = {"yarn": length, "llama3": length, "longrope": length, "default": length}
    rope = {"rope_type": rope_type, "rope_theta": 1_000_000.0, **kinds[rope_type]}
    return {"rope_parameters": rope, "max_position_embeddings": whole.get(rope_type, trained)}


def decoders(name, length, folder):
    """Ours and transformers' decoder, two layers of two heads."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.15}
    if name in ("gemma3", "gpt-oss"):
        return from_official(OFFICIAL[name], folder, length)
    if name == "window":
        return pair("mistral", sliding_window=1000, **sizes, **rotary("default", length))
    return pair("qwen3", **sizes, **rotary(name, length))


_USUAL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
OFFICIAL = {
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        {**_USUAL, "num_key_value_heads": 1, "head_dim": 32, "layer_types": _KINDS, "sliding_window": 512},
    ),
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        {**_USUAL, "num_key_value_heads": 1, "head_dim": 32, "layer_types": _KINDS, "sliding_window": 128}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {**_YARN, "truncate": False, "original_max_position_embeddings": 256}},
    ),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        {**_USUAL, "local_attention": 128, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}


def from_official(row, folder, length):
    """The official model of a row, and ours with its weights."""
    cls, settings = row
    torch.manual_seed(0)
    theirs = cls(cls.config_class(**settings, max_position_embeddings=length)).eval()
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder), theirs


def cases(usual, others):
    """At the shorter length some in the ordinary run; the others, and the longer one, in the exhaustive one."""
    near = [pytest.param(name, NEAR, marks=[] if name in usual else pytest.mark.exhaustive) for name in usual + others]
    # Their attention with sinks holds all scores of a layer at once.
    far = [pytest.param(name, FAR, marks=pytest.mark.exhaustive) for name in usual + others if name != "gpt-oss"]
    return near + far


@torch.no_grad()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "length"),
    cases(["yarn", "dynamic", "window"], ["default", "linear", "llama3", "longrope", "gemma3", "gpt-oss"]),
)
def test_a_decoder(tmp_path, name, length):
    ours, theirs = decoders(name, length, tmp_path)
    ids = token_ids(1, length)
    expected = theirs(ids).logits
    assert_close(ours(ids).logits, expected)
    # What lies far back is seen: the last tokens notice another beginning, unless all layers have a window.
    if name != "window":
        other = torch.cat((token_ids(1, length // 2, seed=1), ids[:, length // 2 :]), dim=1)
        assert not torch.allclose(theirs(other).logits[:, -1], expected[:, -1], rtol=1e-2)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    text = theirs.generate(ids, **settings)
    assert torch.equal(ours.generate(ids, **settings), text)
    ours.prepare_for_inference()
    assert_close(ours(ids).logits, expected)
    assert torch.equal(ours.generate(ids, **settings), text)


@torch.no_grad()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "length"), cases(["modernbert"], []))
def test_an_encoder(tmp_path, name, length):
    """One long text, and one beside it that is a third as long."""
    ours, theirs = from_official(OFFICIAL[name], tmp_path, length)
    ids, mask = token_ids(2 if length == NEAR else 1, length), None
    mask = torch.ones_like(ids)
    mask[1:, length // 3 :] = 0
    ids = ids * mask
    real = mask.bool()
    expected = theirs(ids, attention_mask=mask).logits[real]
    assert_close(ours(ids, attention_mask=mask).logits[real], expected)
    ours.prepare_for_inference()
    assert_close(ours(ids, attention_mask=mask).logits[real], expected)
