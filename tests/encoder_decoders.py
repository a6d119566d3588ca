"""Small encoder-decoders of ours, after T5 and of other blocks, and what they read."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from blockformer import (
    BlockformerEncoderDecoderConfig,
    BlockformerEncoderDecoderForConditionalGeneration,
    from_official,
    preset,
)

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
MODERN = {
    **{name: value for name, value in SMALL.items() if not name.startswith("relative")},
    "num_key_value_heads": 2,
    "qk_norm": True,
    "decoder_layers": 3,
    "share_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "initializer_range": 0.3,
}


def t5(seed=0, name="t5", cls=BlockformerEncoderDecoderForConditionalGeneration, **settings):
    """A small T5 of ours in evaluation mode."""
    torch.manual_seed(seed)
    model = cls(preset(name, **{**SMALL, **DRY, **settings})).eval()
    _liven(model)
    return model


def t5_pair(folder):
    """A T5 of ours and transformers' own with the same weights, which it saves in the folder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "d_model": 48, "d_ff": 80, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    theirs = T5ForConditionalGeneration(T5Config(**sizes, initializer_factor=3.0, decoder_start_token_id=0)).eval()
    torch.nn.init.normal_(theirs.lm_head.weight)
    theirs.save_pretrained(folder)
    return from_official(folder), theirs


def modern(**settings):
    """An encoder-decoder of other blocks: rotary, grouped heads, q/k norm, embeddings of its own on each side."""
    torch.manual_seed(0)
    return BlockformerEncoderDecoderForConditionalGeneration(
        BlockformerEncoderDecoderConfig(**{**MODERN, **settings})
    ).eval()


@torch.no_grad()
def _liven(model):
    """Norms and biases of distance that are not all alike, strong layers, and a peaky head."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if "relative_bias" in name:
            parameter.normal_()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(3)
    if hasattr(model, "lm_head"):
        model.lm_head.weight.mul_(1.6)


def source(side="right", lengths=(11, 4, 8), seed=0):
    """Padded source rows and their mask."""
    width = max(lengths)
    ids = torch.randint(2, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    count = torch.arange(width).expand(len(lengths), width)
    mask = (count < torch.tensor(lengths)[:, None]).long()
    mask = mask if side == "right" else mask.flip(-1)
    return {"input_ids": ids * mask, "attention_mask": mask}


def target(rows=3, length=7, seed=1):
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
