"""BioGPT (Luo et al., 2022): OPT's positions and norms, and embeddings that may be scaled by the root of the width."""

from dataclasses import replace

from ..values import Computed
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .decoder_heads import TOKENS, decoder_heads
from .fresh import root_of_width
from .shared import GPT, QKV, fields_without

CLASSES = "BioGptForCausalLM BioGptModel BioGptForSequenceClassification BioGptForTokenClassification"
HEADS = [
    replace(head, tensors={"output_projection.weight": "lm_head.weight"}) if head.writes_text else head
    for head in decoder_heads(CLASSES, "biogpt.", token_head="classifier")
]
LAYER = {
    **{name: name for name in QKV},
    "self_attn.out_proj": "self_attn.o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "self_attn_layer_norm": "self_attn_pre_norm",
    "final_layer_norm": "mlp_pre_norm",
}
SCALE = Computed(
    lambda official: {"embedding_scale": official.config.hidden_size**0.5 if official.config.scale_embedding else None},
    lambda config, head: {"scale_embedding": config.embedding_scale is not None},
)


def read_dropout(official):
    """Without a dropout of its own, the official head of tokens has the layers'."""
    if not official.head.official.endswith(TOKENS):
        return {}
    return {"classifier_dropout": official.entries.get("classifier_dropout")}


FAMILY = Family(
    "biogpt",
    "BioGptConfig",
    HEADS,
    structure={**GPT, "position_type": "learned", "position_offset": 2, "norm_eps": 1e-5},
    fresh={"hidden_act": "gelu", "embedding_scale": root_of_width, "tie_word_embeddings": True},
    names=DecoderNames(
        layer=LAYER, outer={"embed_tokens": "embed_tokens", "embed_positions": "embed_positions", "layer_norm": "norm"}
    ),
    settings=DecoderSettings(
        usual=fields_without("layer_norm_eps"),
        rope=None,
        head_dim=None,
        computed=[SCALE, Computed(read_dropout)],
        training_only=["layerdrop"],
    ),
)
