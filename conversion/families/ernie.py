"""ERNIE 1 to 3 (Sun et al., 2019 to 2021): BERT, whose embeddings may say the task too."""

from ..values import TOKEN_TYPES, Computed
from .base import Family
from .bert import EMBEDDINGS, FRESH, LANGUAGE_MODEL, NAMES, POSITIONS, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings


def _read_tasks(official):
    config = official.config
    return {"task_type_vocab_size": config.task_type_vocab_size if config.use_task_id else 0}


def _write_tasks(config, head):
    count = config.task_type_vocab_size
    return {"use_task_id": count > 0, **({"task_type_vocab_size": count} if count else {})}


FAMILY = Family(
    "ernie",
    "ErnieConfig",
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
