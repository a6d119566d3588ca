"""DistilBERT (Sanh et al., 2019): BERT without token types and pooler, with a fixed epsilon in its norms.

Two settings only matter for training and have no counterpart here: `qa_dropout`, and `sinusoidal_pos_embds`, which says
how the learned positions were initialised. Its attention output has no dropout; ours has, if you train it further.
"""

from ..values import Computed
from .base import Family
from .bert import FRESH, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import SCORE, LanguageModelNames, encoder_heads

ROWS = {**SCORE, "own_pooler": "pre_classifier"}


def _read_dropout(official):
    of_tokens = official.head.official.endswith("ForTokenClassification")
    return {"classifier_dropout": None if of_tokens else official.config.seq_classif_dropout}


def _write_dropout(config, head):
    return {} if config.classifier_dropout is None else {"seq_classif_dropout": config.classifier_dropout}


FAMILY = Family(
    "distilbert",
    encoder_heads(
        "DistilBertModel DistilBertForMaskedLM DistilBertForSequenceClassification DistilBertForMultipleChoice "
        "DistilBertForTokenClassification DistilBertForQuestionAnswering",
        ROWS,
        ForMultipleChoice=ROWS,
        Model={},
    ),
    structure={**STRUCTURE, "norm_eps": 1e-12, "type_vocab_size": 0},
    fresh={**FRESH, "type_vocab_size": 0, "num_hidden_layers": 6, "pooler_act": "relu"},
    names=EncoderNames(
        root="distilbert.",
        embeddings={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.position_embeddings": "embed_positions",
        },
        layer="transformer.layer.{layer}.",
        modules={
            "attention.q_lin": "self_attn.q_proj",
            "attention.k_lin": "self_attn.k_proj",
            "attention.v_lin": "self_attn.v_proj",
            "attention.out_lin": "self_attn.o_proj",
            "sa_layer_norm": "self_attn_post_norm",
            "ffn.lin1": "mlp.up_proj",
            "ffn.lin2": "mlp.down_proj",
            "output_layer_norm": "mlp_post_norm",
        },
        language_model=LanguageModelNames(
            dense="vocab_transform",
            norm="vocab_layer_norm",
            weight="vocab_projector.weight",
            bias="vocab_projector.bias",
        ),
    ),
    settings=EncoderSettings(
        fields={"dim": "hidden_size", "hidden_dim": "intermediate_size"},
        computed=[Computed(_read_dropout, _write_dropout)],
        pooler_act="relu",
    ),
)
