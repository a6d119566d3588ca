"""OPT (Zhang et al., 2022): learned positions of which two rows come before the first, and ReLU.

In the model of 350 million parameters, token vectors are half as wide as the states, and so is what heads read.
"""

from ..rules.table import module_rules
from ..values import Computed, NotExpressible
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .shared import ALL_BIASES, GPT, QKV

MODULES = {
    **{name: name for name in QKV},
    "self_attn.out_proj": "self_attn.o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
"""Official module of a layer -> ours, without norms."""


def read_norms(official):
    """Norms before or after the sub-layers, perhaps without weights."""
    config = official.config
    affine = config.layer_norm_elementwise_affine
    return {
        "norm_placement": "pre" if config.do_layer_norm_before else "post",
        "final_norm": config.do_layer_norm_before and not config._remove_final_layer_norm,
        "norm_weight": "plain" if affine else "none",
        "norm_bias": affine,
    }


def write_norms(config, head):
    """The way back."""
    if config.norm_bias == (config.norm_weight == "none"):
        raise NotExpressible("norm_bias", "True where norms have weights, else False", config.norm_bias)
    return {
        "do_layer_norm_before": config.norm_placement == "pre",
        "_remove_final_layer_norm": config.norm_placement == "pre" and not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_weight == "plain",
    }


def read_width(official):
    """Token vectors may have another width than the states."""
    config = official.config
    same = config.word_embed_proj_dim == config.hidden_size
    return {"token_embedding_size": None if same else config.word_embed_proj_dim}


def write_width(config, head):
    """The way back."""
    return {"word_embed_proj_dim": config.output_size}


def norm_rules(config):
    """The norms have one name wherever they are."""
    slot = config.norm_placement
    return module_rules({"self_attn_layer_norm": f"self_attn_{slot}_norm", "final_layer_norm": f"mlp_{slot}_norm"})


FAMILY = Family(
    "opt",
    "OPTForCausalLM OPTModel OPTForSequenceClassification OPTForQuestionAnswering",
    structure={**GPT, "position_type": "learned", "position_offset": 2, "padding_position": "before", "norm_eps": 1e-5},
    fresh={"hidden_act": "relu", "tie_word_embeddings": True},
    names=DecoderNames(
        root="model.decoder.",
        bare_root="decoder.",
        layer=MODULES,
        more_rules=norm_rules,
        outer={
            "embed_tokens": "embed_tokens",
            "embed_positions": "embed_positions",
            "project_in": "token_projection",
            "project_out": "final_projection",
            "final_layer_norm": "norm",
        },
    ),
    settings=DecoderSettings(
        fields={"enable_bias": ALL_BIASES},
        rope=None,
        computed=[Computed(read_norms, write_norms), Computed(read_width, write_width)],
        training_only=["layerdrop"],
    ),
)
