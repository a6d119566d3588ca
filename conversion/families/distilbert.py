"""DistilBERT (Sanh et al., 2019): BERT without token types and without a pooler, its norms with a fixed epsilon.

Two settings are about training only and have no place in ours: `qa_dropout`, and `sinusoidal_pos_embds`, which says how
the learned positions were first filled. Its attention output has no dropout; ours has, when it is trained further.
"""

from .bert_like import EncoderFamily
from .encoder_heads import LM, EncoderHead, LanguageModelNames, fields

OURS = "BlockformerEncoder"
SCORE = {"classifier": "score"}


class DistilBertFamily(EncoderFamily):
    """The dropouts of heads have their own names."""

    def dropout_from(self, official, head):
        """See `EncoderFamily.dropout_from`."""
        return None if head.official.endswith("ForTokenClassification") else official.seq_classif_dropout

    def dropout_to(self, config):
        """See `EncoderFamily.dropout_to`."""
        return {} if config.classifier_dropout is None else {"seq_classif_dropout": config.classifier_dropout}


FAMILY = DistilBertFamily(
    name="distilbert",
    config_class="DistilBertConfig",
    root="distilbert.",
    heads=[
        EncoderHead("DistilBertModel", f"{OURS}Model"),
        EncoderHead("DistilBertForMaskedLM", f"{OURS}ForMaskedLM", frozenset([LM])),
        EncoderHead(
            "DistilBertForSequenceClassification",
            f"{OURS}ForSequenceClassification",
            modules=SCORE,
            own_pooler="pre_classifier",
        ),
        EncoderHead(
            "DistilBertForMultipleChoice", f"{OURS}ForMultipleChoice", modules=SCORE, own_pooler="pre_classifier"
        ),
        EncoderHead("DistilBertForTokenClassification", f"{OURS}ForTokenClassification", modules=SCORE),
        EncoderHead(
            "DistilBertForQuestionAnswering", f"{OURS}ForQuestionAnswering", modules={"qa_outputs": "qa_outputs"}
        ),
    ],
    embeddings={
        "embeddings.word_embeddings": "embed_tokens",
        "embeddings.position_embeddings": "embed_positions",
    },
    layer="transformer.layer.{layer}.",
    modules={
        **{f"attention.{name}_lin": f"self_attn.{name}_proj" for name in "qkv"},
        "attention.out_lin": "self_attn.o_proj",
        "sa_layer_norm": "self_attn_post_norm",
        "ffn.lin1": "mlp.up_proj",
        "ffn.lin2": "mlp.down_proj",
        "output_layer_norm": "mlp_post_norm",
    },
    language_model=LanguageModelNames(
        dense="vocab_transform", norm="vocab_layer_norm", weight="vocab_projector.weight", bias="vocab_projector.bias"
    ),
    fields=fields(
        dim="hidden_size",
        hidden_dim="intermediate_size",
        n_layers="num_hidden_layers",
        n_heads="num_attention_heads",
        activation="hidden_act",
        dropout="hidden_dropout",
        attention_dropout="attention_dropout",
    ),
    settings={"norm_eps": 1e-12, "type_vocab_size": 0},
    pooler_act="relu",
)
