"""XLM (Lample and Conneau, 2019) and FlauBERT (Le et al., 2019): BERT whose head for masked tokens is one layer.

A layer's modules stand in four lists. Without a mask, the official classes hide as many tokens at the end as the text
has padding tokens; so they are run with one. Where norms come before the sub-layers, FlauBERT's class indexes a cache
that cannot be indexed, and is run with none.
"""

from typing import Any

import torch

from ..values import Computed, Flag, InnerSize
from .base import Family
from .bert import FRESH, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import LM, SCORE, EncoderHead, LanguageModelNames
from .oracle import Oracle
from .shared import READ_TYPED, TYPED

MODULES = {
    "attentions.{layer}.q_lin": "self_attn.q_proj",
    "attentions.{layer}.k_lin": "self_attn.k_proj",
    "attentions.{layer}.v_lin": "self_attn.v_proj",
    "attentions.{layer}.out_lin": "self_attn.o_proj",
    "ffns.{layer}.lin1": "mlp.up_proj",
    "ffns.{layer}.lin2": "mlp.down_proj",
}
NORMS = {"layer_norm1.{layer}": "self_attn", "layer_norm2.{layer}": "mlp"}


class ListedNames(EncoderNames):
    """The names of an encoder whose norms stand before or after the sub-layers, by the config."""

    def modules_of(self, config):
        """See `EncoderNames.modules_of`."""
        return {**self.modules, **{theirs: f"{ours}_{config.norm_placement}_norm" for theirs, ours in NORMS.items()}}


def _names(prefix: str) -> ListedNames:
    return ListedNames(
        root="transformer.",
        embeddings={"embeddings": "embed_tokens", "position_embeddings": "embed_positions"},
        layer="",
        modules=MODULES,
        stack={"layer_norm_emb": "embedding_norm"},
        language_model=LanguageModelNames(
            dense="", norm="", weight="pred_layer.proj.weight", bias="pred_layer.proj.bias"
        ),
        ignored=["position_ids"],
        refused={
            f"{prefix}ForQuestionAnswering": "its head searches for the best pairs of a start and an end; "
            f"{prefix}ForQuestionAnsweringSimple can be converted",
            f"{prefix}ForMultipleChoice": "it scores a choice in two layers; Blockformer's head has one",
        },
    )


class _NoCache:
    """What an official class takes for an empty cache."""

    def __getitem__(self, layer):
        return None

    def get_seq_length(self):
        return 0


def _named(model, args, named):
    tokens = named["inputs_embeds"][..., 0] if named.get("input_ids") is None and not args else None
    tokens = tokens if tokens is not None else named.get("input_ids", *args[:1])
    if named.get("attention_mask") is None and len(args) < 2:
        named = {**named, "attention_mask": torch.ones_like(tokens, dtype=torch.long)}
    return args, named | ({"cache": _NoCache()} if getattr(model.config, "pre_norm", False) else {})


def _with_masks(model):
    model.register_forward_pre_hook(_named, with_kwargs=True)
    model.can_generate = lambda: False  # it writes by filling in masked tokens; our encoders do not write
    return model


def _heads(prefix: str) -> list[EncoderHead]:
    ours = "BlockformerEncoder"
    return [
        EncoderHead(f"{prefix}Model", f"{ours}Model"),
        EncoderHead(f"{prefix}WithLMHeadModel", f"{ours}ForMaskedLM", parts=frozenset([LM])),
        EncoderHead(
            f"{prefix}ForSequenceClassification",
            f"{ours}ForSequenceClassification",
            modules={"sequence_summary.summary": "score"},
        ),
        EncoderHead(f"{prefix}ForTokenClassification", f"{ours}ForTokenClassification", **SCORE),
        EncoderHead(
            f"{prefix}ForQuestionAnsweringSimple",
            f"{ours}ForQuestionAnswering",
            modules={"qa_outputs": "qa_outputs"},
        ),
    ]


def _read_dropout(official):
    of_rows = official.head.official.endswith("ForSequenceClassification")
    return {"classifier_dropout": float(official.config.summary_first_dropout) if of_rows else None}


def _write_dropout(config, head):
    return {} if config.classifier_dropout is None else {"summary_first_dropout": config.classifier_dropout}


def _languages(official):
    """Vectors of languages are added to tokens where there are several languages."""
    return ["n_langs"] if official.get("n_langs", 1) > 1 and official.get("use_lang_emb", True) else []


POSITIONS = Computed(
    lambda official: {"max_position_embeddings": official.config.max_position_embeddings},
    lambda config, head: {"max_position_embeddings": config.max_position_embeddings},
)
USUAL = {
    "causal": (False,),
    "asm": (False,),
    "is_encoder": (True,),
    "summary_type": ("first",),
    "summary_use_proj": (True,),
    "summary_activation": (None,),
    "summary_proj_to_labels": (True,),
}
SETTINGS: dict[str, Any] = {
    "fields": {"emb_dim": "hidden_size"},
    "positions": POSITIONS,
    "unsupported": USUAL,
    "contradictions": _languages,
    "extra_fields": ("id2lang", "lang2id"),
}
COMPUTED = (
    InnerSize(),
    Flag("gelu_activation", "hidden_act", ("relu", "gelu")),
    Computed(_read_dropout, _write_dropout),
    READ_TYPED,
)
WITHOUT_TRANSFORM = {**STRUCTURE, "lm_head_transform": False, "type_vocab_size": 0}
NEW = {**FRESH, **TYPED, "type_vocab_size": 0, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
XLM = Family(
    "xlm",
    _heads("XLM"),
    structure=WITHOUT_TRANSFORM,
    fresh={**NEW, "vocab_size": 30145, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
    names=_names("XLM"),
    settings=EncoderSettings(computed=COMPUTED, **SETTINGS),
    oracle=Oracle(prepared=_with_masks),
)
FLAUBERT = Family(
    "flaubert",
    _heads("Flaubert"),
    structure={name: value for name, value in WITHOUT_TRANSFORM.items() if name != "norm_placement"},
    fresh={**NEW, "norm_placement": "post", "vocab_size": 68729},
    names=_names("Flaubert"),
    settings=EncoderSettings(
        computed=(
            *COMPUTED,
            Flag("pre_norm", "norm_placement", ("post", "pre")),
            Computed(lambda official: {"final_norm": False}),
        ),
        training_only=("layerdrop",),
        **SETTINGS,
    ),
    oracle=Oracle(prepared=_with_masks),
)
