"""BERT with rotary positions: Nomic Embed (Nussbaum et al.), GTE (Zhang et al.), Jina v3 (Sturua et al.), all of 2024.

Checkpoints hold queries, keys and values in one matrix, and other names than the official classes of today; both are
said here, the classes' names in `IN_MEMORY`.
"""

from collections.abc import Mapping
from typing import Any

from ..values import Computed, HeadDim, Rope
from .bert import EMBEDDINGS, FRESH, LANGUAGE_MODEL, POOLED_ROWS
from .bert import NAMES as BERT_NAMES
from .bert import STRUCTURE as BERT_STRUCTURE
from .bert_like import EMBEDDING_NORM, BertLikeFamily
from .decoder import ALL_BIASES, QKV
from .encoder_heads import ROBERTA_ROWS, EncoderHead, LanguageModelNames, standard_heads
from .fresh import rotary
from .roberta import FRESH as ROBERTA_FRESH
from .roberta import GELU_HEAD
from .roberta import LANGUAGE_MODEL as ROBERTA_LANGUAGE_MODEL

STRUCTURE = {**BERT_STRUCTURE, "position_type": "rotary"}
IN_MEMORY = {"self_attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
"""Our module of a layer -> that of the official classes, where they differ; a plain feed-forward network has others."""
PLAIN_IN_MEMORY = {**IN_MEMORY, "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
GATED_ACTS = {"swiglu": "silu", "geglu": "gelu"}
"""Nomic's own names of what a gate goes through -> those of today."""
TOKEN_TYPES = Computed(
    lambda official: {"type_vocab_size": official.config.type_vocab_size},
    lambda config, head: {"type_vocab_size": config.type_vocab_size},
)


class RotaryBertFamily(BertLikeFamily):
    """A BERT with rotary positions.

    Args:
        names: names of modules outside of layers in the official class -> those in a checkpoint.
        former_fields: earlier names of official fields -> those of today.
        rest: the arguments of `BertLikeFamily`.
    """

    def __init__(
        self,
        name: str,
        config_class: str,
        heads: list[EncoderHead],
        *,
        names: Mapping[str, str] | None = None,
        fields: Mapping[str, str | None] | None = None,
        computed: tuple = (),
        former_fields: Mapping[str, str] | None = None,
        **rest: Any,
    ):
        self.former_fields = dict(former_fields or {})
        embeddings = {theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_positions"}
        own = {"use_cache": None, "max_position_embeddings": "max_position_embeddings", **(fields or {})}
        super().__init__(
            name,
            config_class,
            heads,
            embeddings=embeddings,
            fields={**BERT_NAMES["fields"], **own},
            positions=Rope(),
            computed=[TOKEN_TYPES, *computed],
            extra_fields=tuple(self.former_fields),
            **rest,
        )
        self.outer = dict(names or {})

    def official_config(self, official):
        """See `ConfigTranslation.official_config`; an entry under its name of today comes first."""
        former = {self.former_fields[name]: value for name, value in official.items() if name in self.former_fields}
        if "hidden_act" in former:
            former["hidden_act"] = GATED_ACTS.get(former["hidden_act"], former["hidden_act"])
        today = {name: value for name, value in official.items() if name not in self.former_fields}
        return super().official_config({**former, **today})

    def adjust(self, shapes, variant, config):
        """See `Family.adjust`: the names and matrices of a checkpoint in place of the class's."""
        class_names = IN_MEMORY if config.gated_mlp else PLAIN_IN_MEMORY
        stored = {class_names.get(ours, ours): theirs for theirs, ours in self.modules.items()}
        stored |= {ours: theirs for theirs, parts in self.fused.items() for ours in parts}
        stored_shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super().adjust(shapes, variant, config).items():
            root, _, rest = name.partition("layers.")
            layer, _, rest = rest.partition(".")
            module, _, kind = rest.rpartition(".")
            if module in stored:
                name = root + self.layer.replace("{layer}", layer) + f"{stored[module]}.{kind}"
            for theirs, ours in self.outer.items():
                name = name.replace(theirs, ours)
            stored_shapes[name] = (stored_shapes.get(name, (0,))[0] + shape[0], *shape[1:])
        return stored_shapes


GTE = RotaryBertFamily(
    "gte",
    "GteConfig",
    standard_heads(
        "GteModel GteForMaskedLM GteForSequenceClassification GteForTokenClassification",
        POOLED_ROWS,
    ),
    structure={**STRUCTURE, "gated_mlp": True, "mlp_bias": "down"},
    fresh={
        **FRESH,
        **rotary(160_000.0),
        "vocab_size": 250048,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    root="gte.",
    former_root="new.",
    layer="encoder.layer.{layer}.",
    modules={
        "attention.o_proj": "self_attn.o_proj",
        "attn_ln": "self_attn_post_norm",
        "mlp.down_proj": "mlp.down_proj",
        "mlp_ln": "mlp_post_norm",
    },
    fused={"attention.qkv_proj": QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
    names={"lm_head.layer_norm": "lm_head.norm"},
    language_model=LanguageModelNames(
        dense="lm_head.dense", norm="lm_head.norm", weight="lm_head.decoder.weight", bias="lm_head.decoder.bias"
    ),
    computed=(GELU_HEAD,),
)
NOMIC = RotaryBertFamily(
    "nomic_bert",
    "NomicBertConfig",
    standard_heads(
        "NomicBertModel NomicBertForMaskedLM NomicBertForSequenceClassification NomicBertForTokenClassification",
        POOLED_ROWS,
    ),
    structure={**STRUCTURE, **dict.fromkeys(ALL_BIASES, False), "gated_mlp": True},
    fresh={
        **FRESH,
        **rotary(1_000.0),
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    root="nomic_bert.",
    layer="encoder.layers.{layer}.",
    modules={
        "attn.out_proj": "self_attn.o_proj",
        "norm1": "self_attn_post_norm",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm2": "mlp_post_norm",
    },
    fused={"attn.Wqkv": QKV},
    stack={"emb_ln": "embedding_norm"},
    names={next(iter(EMBEDDING_NORM)): "emb_ln"},
    language_model=LanguageModelNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.layer_norm",
        weight=LANGUAGE_MODEL.weight,
        bias=LANGUAGE_MODEL.bias,
        copy=LANGUAGE_MODEL.copy,
    ),
    computed=(HeadDim(),),
    former_fields={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation_function": "hidden_act",
        "rotary_emb_base": "rope_theta",
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
    },
    unsupported={
        **dict.fromkeys(
            "qkv_proj_bias mlp_fc1_bias mlp_fc2_bias prenorm parallel_block rotary_emb_interleaved use_rms_norm "
            "causal".split(),
            (False,),
        ),
        "rotary_emb_fraction": (1.0,),
        **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), (None,)),
    },
)
JINA = RotaryBertFamily(
    "jina_embeddings_v3",
    "JinaEmbeddingsV3Config",
    standard_heads(
        "JinaEmbeddingsV3Model JinaEmbeddingsV3ForMaskedLM "
        "JinaEmbeddingsV3ForSequenceClassification JinaEmbeddingsV3ForTokenClassification "
        "JinaEmbeddingsV3ForQuestionAnswering",
        ROBERTA_ROWS,
    ),
    structure=STRUCTURE,
    fresh={
        **ROBERTA_FRESH,
        **rotary(20_000.0),
        "vocab_size": 250002,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "position_offset": 0,
    },
    root="roberta.",
    layer="encoder.layers.{layer}.",
    modules={
        "mixer.out_proj": "self_attn.o_proj",
        "norm1": "self_attn_post_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm2": "mlp_post_norm",
    },
    fused={"mixer.Wqkv": QKV},
    stack={"emb_ln": "embedding_norm"},
    names={next(iter(EMBEDDING_NORM)): "emb_ln"},
    language_model=ROBERTA_LANGUAGE_MODEL,
    fields={"use_cache": "use_cache"},
    computed=(GELU_HEAD,),
)
