"""BERT (Devlin et al., 2019): every token sees the whole text; also as a decoder, with cross-attention or without.

ERNIE (Sun et al., 2019 to 2021) is BERT with one more kind of embedding.
"""

from typing import Any

from ..values import TOKEN_TYPES, Computed, EncoderPositions
from .base import Family
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import LanguageModelNames
from .preset import Preset
from .shared import BIASES

STRUCTURE = {
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "position_type": "learned",
    "gated_mlp": False,
    **BIASES,
    "embedding_norm": True,
    "lm_head_transform": True,
    "lm_head_bias": True,
}
FRESH = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}
LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "self_attn_post_norm",
    "crossattention.self.query": "cross_attn.q_proj",
    "crossattention.self.key": "cross_attn.k_proj",
    "crossattention.self.value": "cross_attn.v_proj",
    "crossattention.output.dense": "cross_attn.o_proj",
    "crossattention.output.LayerNorm": "cross_attn_post_norm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "mlp_post_norm",
}
EMBEDDINGS = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_token_types",
}
NAMES: dict[str, Any] = {
    "embeddings": EMBEDDINGS,
    "layer": "encoder.layer.{layer}.",
    "modules": LAYER,
    "relative_key": "attention.self.distance_embedding.weight",
}
POSITIONS = EncoderPositions(relative=True)
"""What RoBERTa has too."""

LANGUAGE_MODEL = LanguageModelNames(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    weight="cls.predictions.decoder.weight",
    bias="cls.predictions.bias",
    copy="cls.predictions.decoder.bias",
)

PRESETS = {"bert-decoder": Preset("decoder", {**STRUCTURE, "pad_token_learns": False, **FRESH})}
BERT = Family(
    "bert",
    "BertModel BertForMaskedLM BertForSequenceClassification BertForMultipleChoice "
    "BertForTokenClassification BertForQuestionAnswering BertLMHeadModel BertForPreTraining "
    "BertForNextSentencePrediction",
    structure=STRUCTURE,
    fresh={**FRESH, "pooler_act": "tanh"},
    names=EncoderNames(root="bert.", **NAMES, language_model=LANGUAGE_MODEL),
    settings=EncoderSettings(positions=POSITIONS, computed=[TOKEN_TYPES]),
)


# ERNIE 1 to 3 (Sun et al., 2019 to 2021): BERT, whose embeddings may say the task too.
def _read_tasks(official):
    config = official.config
    return {"task_type_vocab_size": config.task_type_vocab_size if config.use_task_id else 0}


def _write_tasks(config, head):
    count = config.task_type_vocab_size
    return {"use_task_id": count > 0, **({"task_type_vocab_size": count} if count else {})}


ERNIE = Family(
    "ernie",
    "ErnieModel ErnieForMaskedLM ErnieForSequenceClassification ErnieForMultipleChoice "
    "ErnieForTokenClassification ErnieForQuestionAnswering ErnieForCausalLM "
    "ErnieForPreTraining ErnieForNextSentencePrediction",
    structure=STRUCTURE,
    fresh={**FRESH, "pooler_act": "tanh", "task_type_vocab_size": 3},
    names=EncoderNames(
        root="ernie.",
        **{**NAMES, "embeddings": {**EMBEDDINGS, "embeddings.task_type_embeddings": "embed_task_types"}},
        language_model=LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(
        positions=POSITIONS,
        computed=[TOKEN_TYPES, Computed(_read_tasks, _write_tasks)],
    ),
)
