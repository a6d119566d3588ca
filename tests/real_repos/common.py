"""Entries that the records of many checkpoints share."""

from typing import Any

from .record import Rows, Token

HUGE = 1000000000000000019884624838656
"""What `model_max_length` is where nobody set it."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
APACHE = "                                 Apache License\n                           Version 2.0, January 2004\n"
MIT = "MIT License\n\nCopyright (c) the authors\n"


def bert_config(architecture: str = "BertForMaskedLM", model_type: str = "bert", **more: Any) -> dict[str, Any]:
    """`config.json` of a BERT; an entry given as `...` is left out."""
    return {
        "architectures": [architecture],
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": Rows(),
        **more,
    }


def roberta_config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """`config.json` of a RoBERTa: its positions begin after that of the padding."""
    usual = {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "gradient_checkpointing": ...,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 66,
        "pad_token_id": 1,
        "position_embedding_type": ...,
        "transformers_version": ...,
        "type_vocab_size": 1,
        "use_cache": ...,
    }
    return bert_config(architecture, model_type, **{**usual, **more})


def llama_config(architecture: str = "LlamaForCausalLM", model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """`config.json` of a Llama and of the many after it; an entry given as `...` is left out."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": Rows(3),
        **more,
    }


def ends(begin: str | None, end: str, pad: str | None = None) -> dict[str, Any]:
    """The entries of the special tokens' ids."""
    named = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    return {name: Token(token) for name, token in named.items() if token is not None}


def written_by(version: str, **entries: Any) -> dict[str, Any]:
    """`generation_config.json` as a release of transformers derived it from the model's settings."""
    return {"_from_model_config": True, **entries, "transformers_version": version}


def sentence_files(pooling: str = "mean", normalize: bool = True, length: int = 256) -> dict[str, Any]:
    """The files of sentence-transformers."""
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(parts)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            **({"pooling_mode_lasttoken": True} if pooling == "lasttoken" else {}),
        },
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "2.2.2", "transformers": "4.33.0", "pytorch": "2.1.2"}
        },
    }
