"""Falcon (Almazrouei et al., 2023), the first architecture and the new one.

The first has one key/value head and sub-layers that share a norm, or plain heads and sub-layers one after the other.
The new one has groups of heads, side by side in one matrix, and two norms or one.
"""

from blockformer.files.errors import ConversionError

from ..rules.operations import Split
from ..rules.table import module_rules
from ..values import Computed, NotExpressible
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .gpt_neox import NETWORK
from .shared import ALL_BIASES, QKV, ROTARY_GPT


def read_architecture(official):
    """Heads and norms."""
    config = official.config
    if config.alibi:
        raise ConversionError(
            "config.json: alibi is true, which Falcon rounds to bfloat16 and Blockformer does not; only models of this "
            "family with rotary positions can be converted, so run this one with transformers"
        )
    new, parallel = config.new_decoder_architecture, config.parallel_attn
    norms = config.num_ln_in_parallel_attn
    norms = (2 if new else 1) if norms is None else norms
    if (new and not parallel) or (norms == 2 and not new):
        raise ConversionError(
            "config.json: no Falcon has this combination of num_ln_in_parallel_attn and parallel_attn; change one"
        )
    heads = config.num_kv_heads if new else 1 if config.multi_query else config.num_attention_heads
    shared = "parallel" if norms == 2 else "parallel_shared_norm"
    return {"num_key_value_heads": heads, "residual": shared if parallel else "sequential"}


def is_new(config) -> bool:
    """Whether a Blockformer config needs the new architecture."""
    return config.residual == "parallel" or config.num_key_value_heads not in (1, config.num_attention_heads)


def write_architecture(config, head):
    """The way back."""
    if is_new(config) and config.residual == "sequential":
        raise NotExpressible("residual", "'parallel' with groups of heads", config.residual)
    return {
        "alibi": False,
        "new_decoder_architecture": is_new(config),
        "parallel_attn": config.residual != "sequential",
        "multi_query": config.num_key_value_heads == 1,
        "num_kv_heads": config.num_key_value_heads,
        "num_ln_in_parallel_attn": (2 if config.residual == "parallel" else 1) if is_new(config) else None,
    }


def split(config, rows):
    """Each key/value head with its query heads before it; one of all heads comes last either way."""
    return Split(0, rows, config.num_key_value_heads)


def norm_rules(config):
    """Norms are named by how many there are."""
    two = {"ln_attn": "self_attn_pre_norm", "ln_mlp": "mlp_pre_norm"}
    one = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
    return module_rules(two if config.residual == "parallel" else one)


FAMILY = Family(
    "falcon",
    "FalconForCausalLM FalconModel FalconForSequenceClassification FalconForTokenClassification "
    "FalconForQuestionAnswering",
    structure=ROTARY_GPT,
    fresh={
        **rotary(10_000.0),
        **dict.fromkeys(ALL_BIASES, False),
        "hidden_act": "gelu",
        "residual": "parallel",
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={
            "self_attention.query_key_value": QKV,
            "self_attention.dense": "self_attn.o_proj",
            **NETWORK,
        },
        more_rules=norm_rules,
        outer={"word_embeddings": "embed_tokens", "ln_f": "norm"},
        layers="h.{layer}.",
        split=split,
        former_classes={"RWForCausalLM": "FalconForCausalLM", "RWModel": "FalconModel"},
    ),
    settings=DecoderSettings(
        fields={"ffn_hidden_size": "intermediate_size", "bias": ALL_BIASES},
        computed=[Computed(read_architecture, write_architecture)],
    ),
    pad_token_learns=True,
)
