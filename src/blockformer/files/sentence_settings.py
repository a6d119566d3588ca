"""What `sentence-transformers` reads of an embedder or a reranker, written anew.

Modules have the names that its versions from 3 on know.
"""

from collections.abc import Mapping
from typing import Any

from .names import MODULES, SETTINGS

BODY = "sentence_bert_config.json"
"""The settings of the model itself among the modules."""
FLOAT32 = "keep_in_fp32_modules"
"""The entry that names modules of a reranker that compute in float32."""
POOLINGS = {"mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
"""How the states of a text become one vector -> the entry of the module's settings."""
_MODULE = "sentence_transformers.models"


def of_embedder(size: int, pooling: str, prompts: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """File -> content, for a model whose states are pooled and brought to length 1.

    Args:
        size: of a state.
        pooling: a key of `POOLINGS`.
        prompts: name -> what is put before a text.
        before: `config_sentence_transformers.json` of the source, or nothing.
    """
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    settings = {"model_type": "SentenceTransformer", "default_prompt_name": None, "similarity_fn_name": "cosine"}
    return {
        MODULES: _listed(modules),
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            **{entry: name == pooling for name, entry in POOLINGS.items()},
            "pooling_mode_cls_token": False,
            "include_prompt": True,
        },
        SETTINGS: {**settings, **before, "prompts": {**before.get("prompts", {}), **prompts}},
    }


def of_reranker(template: str | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """File -> content, for a classifier of pairs.

    Args:
        template: how the chat template that renders a pair reads messages: "flat" or "structured"; None if the
            tokenizer joins the two texts.
        before: `config_sentence_transformers.json` of the source, or nothing.
    """
    takes: dict[str, Any] = {"method": "forward", "method_output_name": "logits"}
    kinds = {"text": takes} | ({} if template is None else {"message": {**takes, "format": template}})
    settings: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
    before = {name: value for name, value in before.items() if name != FLOAT32}  # of the head, which is float32 here
    return {
        MODULES: _listed({"": "Transformer"}),
        BODY: {
            "transformer_task": "sequence-classification",
            "modality_config": kinds,
            "module_output_name": "scores",
        },
        SETTINGS: {**settings, "activation_fn": "torch.nn.modules.activation.Sigmoid", **before},
    }


def _listed(kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """The content of `modules.json`, of folder -> class."""
    return [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULE}.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
