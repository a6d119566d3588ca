"""Checkpoints with other towers next to the text model, such as a vision encoder: which family their text is of.

transformers calls their configs composite: `text_config` describes the text model, which is the same as one that a
family has, under other names. A record says so; the text then has the settings of its family.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PretrainedConfig

from blockformer.files.config_file import NEVER_FOLLOWED
from blockformer.files.errors import ConversionError, reason_of, shown
from blockformer.files.quantized import FIELDS

from ..storage.compressed import COMPRESSED
from ..storage.fp8 import FP8, MODELOPT
from ..storage.gptq import GPTQ
from ..storage.low_bits import FIELD
from ..values import AXES, TOKENS
from .head import RELEASED
from .registry import Family, family_by_name
from .settings import ABOUT_THE_FILE


@dataclass(frozen=True)
class Composite:
    """A kind of checkpoint that holds the text model of a family and other towers.

    Attributes:
        name: the official classes without their endings, `Config` and that of the model.
        families: `model_type` of the text's settings -> the family that has the same text model.
        ending: that of the model.
        always: settings of that family that the text has without saying so.
        text: the setting that describes the text; "" if all do, and the text is the whole without its towers.
        towers: what the names of the other tensors begin with, where the text's begin so, too.
        last_axes: ending of a tensor's name -> the setting that its last axis is as long as. Files may have it last but
            one instead, which the official class then exchanges with the last.
    """

    name: str
    families: Mapping[str, str]
    ending: str = "ForConditionalGeneration"
    always: Mapping[str, Any] = field(default_factory=dict)
    last_axes: Mapping[str, str] = field(default_factory=dict)
    text: str = "text_config"
    towers: tuple[str, ...] = ()

    def text_in(self, whole: PretrainedConfig) -> PretrainedConfig:
        """What describes the text in the configuration of the whole."""
        return getattr(whole, self.text) if self.text else whole

    @property
    def model_class_name(self) -> str:
        """The official class of the whole model."""
        return self.name + self.ending


PLAIN = {name: name for name in ("llama", "mistral", "qwen2")}
COMPOSITES = {
    "gemma3": Composite("Gemma3", {"gemma3_text": "gemma3_text"}),
    "gemma4": Composite("Gemma4", {"gemma4_text": "gemma4_text"}),
    "gemma4_unified": Composite("Gemma4Unified", {"gemma4_unified_text": "gemma4_unified_text"}),
    "cohere_compass": Composite("CohereCompass", {"cohere_compass_text": "cohere_compass_text"}),
    "aria": Composite("Aria", {"aria_text": "aria_text"}),
    "embedding_gemma2": Composite("EmbeddingGemma2", {"embedding_gemma2_text": "embedding_gemma2_text"}, "Model"),
    "llava": Composite("Llava", PLAIN),
    "llava_next": Composite("LlavaNext", PLAIN),
    "llava_onevision": Composite("LlavaOnevision", PLAIN),
    "mistral3": Composite("Mistral3", {name: name for name in ("mistral", "ministral3", "mistral4")}),
    "qwen2_vl": Composite("Qwen2VL", {"qwen2_vl_text": "qwen2"}),
    "qwen2_5_vl": Composite("Qwen2_5_VL", {"qwen2_5_vl_text": "qwen2"}),
    "qwen3_vl": Composite("Qwen3VL", {"qwen3_vl_text": "qwen3"}),
    "qwen3_vl_moe": Composite(
        "Qwen3VLMoe",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        always={"norm_topk_prob": True},
        last_axes={".experts.gate_up_proj": "hidden_size", ".experts.down_proj": "moe_intermediate_size"},
    ),
    "t5gemma2": Composite(
        "T5Gemma2",
        {"t5gemma2": "t5gemma2"},
        text="",
        towers=("model.encoder.vision_tower.", "model.encoder.multi_modal_projector."),
    ),
    "qwen3_5": Composite("Qwen3_5", {"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": Composite("Qwen3_5Moe", {"qwen3_5_moe_text": "qwen3_5_moe_text"}),
}
"""The official `model_type` -> its record."""


@dataclass(frozen=True)
class Text:
    """The text of a composite `config.json`.

    Attributes:
        model_type: of the composite.
        whole: its official configuration object.
        family: the family of the text.
        entries: the `config.json` that the text has as a checkpoint of its family.
    """

    model_type: str
    whole: PretrainedConfig
    family: Family
    entries: dict[str, Any]

    @property
    def last_axes(self) -> dict[str, int]:
        """Ending of a tensor's name -> the length of its last axis: see `Composite`."""
        named = COMPOSITES[self.model_type].last_axes
        return {ending: getattr(self.whole.text_config, setting) for ending, setting in named.items()}

    @property
    def towers(self) -> tuple[str, ...]:
        """What the names of the other tensors begin with: see `Composite`."""
        return COMPOSITES[self.model_type].towers

    @property
    def whole_class(self) -> type[transformers.PreTrainedModel]:
        """The official class of the composite."""
        return getattr(transformers, COMPOSITES[self.model_type].model_class_name)


def text_of(entries: Mapping[str, Any]) -> Text | None:
    """The text model that a composite `config.json` describes; None where it is not composite.

    Raises:
        ConversionError: its text is of no family, or its settings are refused.
    """
    model_type = entries.get("model_type")
    record = COMPOSITES.get(model_type) if isinstance(model_type, str) else None
    if record is None or not isinstance(model_type, str):
        return None
    if record.model_class_name not in RELEASED:
        raise ConversionError(
            f"config.json: model_type {shown(model_type)} is not supported by transformers "
            f"{transformers.__version__}; install a newer one"
        )
    named = entries.get("architectures") or [record.model_class_name]
    if named != [record.model_class_name]:
        raise ConversionError(
            f"config.json: architectures is {shown(named)}; of {model_type!r} only {record.model_class_name} is read"
        )
    inner = entries.get("text_config")
    told = [name for each in (entries, inner) if isinstance(each, Mapping) for name in FIELDS if each.get(name)]
    is_read = any(each.is_told(entries) for each in (COMPRESSED, FP8, GPTQ, MODELOPT))
    if told and not (told == [FIELD] and is_read):
        raise ConversionError(
            f"config.json: of low-bit weights only FP8, GPTQ and compressed-tensors are read in a checkpoint of "
            f"{model_type!r}; use the one with plain weights, or make them with dequantize() of transformers"
        )
    whole = _whole(record, entries)
    text = record.text_in(whole)
    if text.model_type not in record.families:
        raise ConversionError(
            f"config.json: text_config is of {shown(text.model_type)}; in a checkpoint of {model_type!r} the text "
            f"can be of {', '.join(record.families)}"
        )
    family = family_by_name(record.families[text.model_type])
    text_entries = _entries(entries, whole, family, record) | ({FIELD: entries[FIELD]} if told else {})
    return Text(model_type, whole, family, text_entries)


def _whole(record: Composite, entries: Mapping[str, Any]) -> PretrainedConfig:
    hidden = (*ABOUT_THE_FILE, *NEVER_FOLLOWED)
    plain = {name: copy.deepcopy(value) for name, value in entries.items() if name not in hidden}
    for inner in plain.values():
        for name in hidden if isinstance(inner, dict) else ():
            inner.pop(name, None)
    try:
        return getattr(transformers, f"{record.name}Config")(**plain)
    except Exception as error:
        raise ConversionError(f"config.json: {record.name}Config refuses it: {reason_of(error)}") from error


def _entries(entries: Mapping[str, Any], whole: PretrainedConfig, family: Family, record: Composite) -> dict[str, Any]:
    """The text's settings as its family writes them, with what only the composite says: ties, dtype and tokens."""
    inner = record.text_in(whole)
    text = inner.to_dict()
    names = (*family.settings.defaults.to_dict(), "head_dim")  # which some official classes read without a default
    known = {name: text[name] for name in names if name in text and name not in ABOUT_THE_FILE}
    known |= {**record.always, "architectures": [family.heads[0].official]}
    known |= {"tie_word_embeddings": whole.tie_word_embeddings} if hasattr(whole, "tie_word_embeddings") else {}
    known |= {"model_type": family.model_type, "dtype": whole.dtype or inner.dtype}
    known |= {name: entries[name] for name in TOKENS if entries.get(name) is not None}
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and family.model_type != inner.model_type:
        known["rope_parameters"] = {name: value for name, value in rope.items() if name not in AXES}
    official = family.settings.official_config(known).to_diff_dict()
    kept = {name: value for name, value in official.items() if name not in ABOUT_THE_FILE}
    return {"architectures": known["architectures"], **kept}
