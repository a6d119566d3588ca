"""A family: how one official kind of checkpoint and our settings say the same thing.

The official side is read through the configuration class of transformers, so that its defaults, its old spellings
(`rope_theta`, `rope_scaling`, `torch_dtype`) and its checks are the official ones, not a copy of them. No code of a
checkpoint takes part: the class is named by the family.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from .errors import ConversionError, listed, shown
from .mapping import RuleTable

# Official settings that change what a model computes and that no family here has: name -> values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "per_layer_config": (None, {}),
}
ABOUT_THE_FILE = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config file that say where it comes from, not what the model is."""
NEVER_FOLLOWED = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "custom_generate",
    "kernel_config",
)
"""Entries of a config file that can name code to be loaded. They are dropped, whatever they say."""


class Family(ABC):
    """One official architecture.

    Args:
        name: the official `model_type`.
        config_class: name of the official configuration class in transformers.
        model_class: name of the official model class in transformers.
        our_config_class: name of ours in `blockformer`.
        our_model_class: name of ours in `blockformer`.
        rules: which tensors are which.
    """

    def __init__(
        self,
        name: str,
        config_class: str,
        model_class: str,
        our_config_class: str,
        our_model_class: str,
        rules: RuleTable,
    ):
        self.name = name
        self.config_class_name = config_class
        self.model_class_name = model_class
        self.our_config_class_name = our_config_class
        self.our_model_class_name = our_model_class
        self.rules = rules

    @abstractmethod
    def config_from(self, official: Mapping[str, Any]) -> dict[str, Any]:
        """Our settings for an official `config.json`.

        Raises:
            ConversionError: naming every official setting that ours cannot express.
        """

    @abstractmethod
    def config_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official `config.json` for a config of ours.

        Raises:
            ConversionError: naming every field of ours that the family cannot express.
        """

    @abstractmethod
    def differences(self, config: PretrainedConfig) -> list[str]:
        """The fields of a config of ours that this family cannot express, with what it would need; empty: none."""

    @property
    def official_config_class(self) -> type[PretrainedConfig]:
        """The official configuration class."""
        return getattr(transformers, self.config_class_name)

    @property
    def official_model_class(self) -> type[PreTrainedModel]:
        """The official model class."""
        return getattr(transformers, self.model_class_name)

    @property
    def config_class(self) -> type[PretrainedConfig]:
        """Our configuration class."""
        import blockformer

        return getattr(blockformer, self.our_config_class_name)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our model class."""
        import blockformer

        return getattr(blockformer, self.our_model_class_name)

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """The official configuration object of a `config.json`.

        Raises:
            ConversionError: transformers refuses it.
        """
        settings = {name: value for name, value in official.items() if name not in ABOUT_THE_FILE + NEVER_FOLLOWED}
        try:
            return self.official_config_class(**copy.deepcopy(settings))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConversionError(f"config.json: {self.config_class_name} refuses it: {reason}") from error

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        """Our configuration object of the settings that `config_from` gives.

        Raises:
            ConversionError: our config refuses them.
        """
        try:
            config = self.config_class(**copy.deepcopy(dict(settings)))
        except ConversionError:
            raise
        except ValueError as error:
            raise ConversionError(f"config.json: {error}") from error
        config.architectures = [self.our_model_class_name]
        return config

    def refuse_unsupported(self, official: Mapping[str, Any]) -> None:
        """Refuse settings that no family here can express, and another task's head.

        Raises:
            ConversionError: naming each of them.
        """
        lines = [
            f"{name} is {shown(value)}"
            for name, value in official.items()
            if name in UNSUPPORTED and not any(value == unused for unused in UNSUPPORTED[name])
        ]
        architectures = official.get("architectures")
        if architectures not in (None, [], [self.model_class_name]):
            lines.append(f"architectures is {shown(architectures)}, not ['{self.model_class_name}']")
        if lines:
            raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Entries of an official `config.json` that the official class does not know, so that they change nothing."""
        known = set(self.official_config({}).to_dict()) | {*ABOUT_THE_FILE, *NEVER_FOLLOWED, *UNSUPPORTED}
        known |= {"architectures", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "head_dim"}
        known |= set(transformers.GenerationConfig().to_dict())
        return sorted(name for name in official if name not in known)
