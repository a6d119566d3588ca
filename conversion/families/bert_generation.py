"""BERT for sequence generation (Rothe et al., 2020): BERT without token types, its decoder's head one layer."""

from .base import Family
from .bert import EMBEDDINGS, LAYER, STRUCTURE
from .bert import FRESH as BERT_FRESH
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import LM, EncoderHead, LanguageModelNames

STACK = "BertGenerationEncoder"
FAMILY = Family(
    "bert-generation",
    [
        EncoderHead(STACK, "BlockformerEncoderModel"),
        EncoderHead(STACK, "BlockformerDecoderModel", is_decoder=True),
        EncoderHead("BertGenerationDecoder", "BlockformerDecoderForCausalLM", parts=frozenset([LM]), is_decoder=True),
    ],
    config_class="BertGenerationConfig",
    structure={**STRUCTURE, "lm_head_transform": False},
    fresh={
        **BERT_FRESH,
        "vocab_size": 50358,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "type_vocab_size": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    names=EncoderNames(
        root="bert.",
        embeddings={theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_token_types"},
        layer="encoder.layer.{layer}.",
        modules=LAYER,
        language_model=LanguageModelNames(
            dense="", norm="", weight="lm_head.decoder.weight", bias="lm_head.bias", copy="lm_head.decoder.bias"
        ),
    ),
    settings=EncoderSettings(),
)
