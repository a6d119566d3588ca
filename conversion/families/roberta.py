"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): BERT whose positions begin after the padding id.

The head of rows has a dense layer of its own, which is our pooler. The language model head always has `gelu`, whatever
`hidden_act` says.
"""

from ..errors import ConversionError, shown
from .bert import EMBEDDINGS, FIELDS, LAYER
from .bert_like import EncoderFamily
from .encoder_heads import LanguageModelNames, standard_heads


class RobertaFamily(EncoderFamily):
    """RoBERTa under one of its names.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
    """

    def __init__(self, name: str, prefix: str):
        super().__init__(
            name=name,
            config_class=f"{prefix}Config",
            root="roberta.",
            heads=standard_heads(
                prefix,
                {"modules": {"classifier.out_proj": "score"}, "own_pooler": "classifier.dense"},
                f"{prefix}ForCausalLM",
                next_sentence=False,
            ),
            embeddings=EMBEDDINGS,
            layer="encoder.layer.{layer}.",
            modules=LAYER,
            language_model=LanguageModelNames(
                dense="lm_head.dense",
                norm="lm_head.layer_norm",
                weight="lm_head.decoder.weight",
                bias="lm_head.bias",
                copy="lm_head.decoder.bias",
            ),
            fields=FIELDS,
            relative_key="attention.self.distance_embedding.weight",
            shifted=True,
        )

    def check_language_model(self, settings):
        """See `EncoderFamily.check_language_model`."""
        if settings["hidden_act"] != "gelu":
            raise ConversionError(
                f"hidden_act must be 'gelu' with a language model head, which always has it, not "
                f"{shown(settings['hidden_act'])}"
            )


FAMILY = RobertaFamily("roberta", "Roberta")
XLM = RobertaFamily("xlm-roberta", "XLMRoberta")
