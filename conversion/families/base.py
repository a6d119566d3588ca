"""A family: one kind of official checkpoint, as the record of its names, its settings and the official class."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from blockformer.declared_fields import axes_of
from blockformer.files.errors import ConversionError, listed
from blockformer.files.quiet import quiet

from ..storage.variant import CheckpointVariant
from .decoder import DecoderNames, DecoderSettings
from .head import Head
from .names import Names
from .oracle import Oracle
from .preset import Preset
from .settings import Settings, of_padding

NOT_COMPUTED = frozenset(
    "blocks other_entries use_cache initializer_range classifier_dropout nextn_loss_weight pad_token_learns "
    "scales_in_embedding decoder_reads_source token_types_as_tokens".split()
)
"""Our fields that need not come back: nothing that a trained model computes of tokens depends on them."""
OF_LANGUAGE_MODELS = frozenset(("lm_head_transform", "lm_head_bias", "logit_scale", "tie_word_embeddings"))
"""Our fields that need not come back from a model without a language model head."""


class Family:
    """One official kind of model: its heads, and three objects that each know one thing of it.

    `config_from` reads an official config, `config_to` writes one, and `differences` follows from both: whatever a
    round trip out and in does not preserve, the family cannot express. So a field that it does not name must have its
    default.

    Args:
        name: the official `model_type`, and the preset's name; another name for a model that shares its type.
        heads: what its models are for; the first is taken where a config does not say. Or the names of the official
            classes, the language model first, where their heads are as usual (`Names.usual_heads`).
        config_class: name of the official configuration class in transformers; None: it begins as the first class does.
        names: how its checkpoints name and store tensors; None: as a decoder with Llama's names.
        settings: how its configs say what a model is; None: as a decoder's with the usual fields.
        structure: our fields that are the same in all of its models, except what `settings` reads from a field.
        fresh: what a fresh model has beyond its structure; None: the family has no preset.
        oracle: how the official class is run; None: as for all families of these names.
        model_type: the official one, if that is not the name.
        pad_token_learns: whether the official class trains the embedding of padding.
        scales_in_embedding: whether its embedding module multiplies what it looks up, where anything does; "rounded":
            by the factor in the weights' dtype.
        extra_code: code that a converted repo carries in addition to the model's: its path in the repo -> ours.
    """

    is_file = False
    """Whether a checkpoint is one weight file with a file of settings, and is only read, never written."""

    def __init__(
        self,
        name: str,
        heads: str | Sequence[Head],
        *,
        config_class: str | None = None,
        names: Names | None = None,
        settings: Settings | None = None,
        structure: Mapping[str, Any] | None = None,
        fresh: Mapping[str, Any] | None = None,
        oracle: Oracle | None = None,
        model_type: str = "",
        pad_token_learns: bool = False,
        scales_in_embedding: bool | str = False,
        extra_code: Mapping[str, Path] | None = None,
    ):
        self.name, self.model_type = name, model_type or name
        names = DecoderNames() if names is None else names
        settings = DecoderSettings() if settings is None else settings
        self.heads: tuple[Head, ...] = tuple(names.usual_heads(heads) if isinstance(heads, str) else heads)
        structure = dict(structure or {})
        self.settings = replace(
            settings,
            family=name,
            model_type=self.model_type,
            config_class=_config_of(self.heads) if config_class is None else config_class,
            heads=self.heads,
            structure=structure,
            low_bits=names.low_bits,
            pad_token_learns=pad_token_learns,
            scales_in_embedding=scales_in_embedding,
            usual=names.usual_fields if settings.usual is None else settings.usual,
        )
        self.names = replace(names, family=name, heads=self.heads, settings=self.settings)
        self.oracle = names.oracle if oracle is None else oracle
        learns = of_padding(names.topology, pad_token_learns)
        chosen = {} if fresh is None else {**structure, **learns, **fresh}
        if scales_in_embedding and chosen.get("embedding_scale") is not None:
            chosen["scales_in_embedding"] = scales_in_embedding
        self.preset = None if fresh is None else Preset(names.topology, chosen)
        self.extra_code = dict(extra_code or {})

    def config_from(self, official: Mapping[str, Any], variant: CheckpointVariant | None = None) -> dict[str, Any]:
        """Our settings for an official `config.json`, `architectures` among them.

        Args:
            official: the entries.
            variant: what is known of the checkpoint; None takes only what `official` says.

        Raises:
            ConversionError: naming every official setting that ours cannot express.
        """
        settings = self._read(official, variant or self.names.variant_of(official))
        self.settings.our_config(settings)
        return settings

    def config_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official `config.json` for a Blockformer config.

        Raises:
            ConversionError: naming every Blockformer field that the family cannot express.
        """
        lines = self.differences(config)
        if self.is_file:
            raise ConversionError(f"the family '{self.name}' can be read but not written; name another one")
        if lines:
            raise ConversionError(f"the family '{self.name}' cannot express this config:{listed(lines)}")
        return self.settings.write(config, self.names.head(self.names.variant_for(config)))[0]

    def differences(self, config: PretrainedConfig) -> list[str]:
        """The fields of a Blockformer config that this family cannot express, with what it would need; empty: none.

        They are the fields that are not the same after `config_to` and `config_from`.
        """
        if self.is_file:
            return [f"'{self.name}' is read and not written"]
        config = self.settings.written_as(config)
        if not self.has_topology_of(config):
            kinds = dict.fromkeys(head.config_class.model_type for head in self.heads)
            return [f"model_type must be {' or '.join(map(repr, kinds))}"]
        head = self.names.head_for(config)
        if head is None:
            return [f"architectures must be one of {', '.join(dict.fromkeys(head.ours for head in self.heads))}"]
        variant, fixed = self.names.variant_for(config), self.settings.constant
        official, lacking = self.settings.write(config, self.names.head(variant))
        lines = {error.field: str(error) for error in lacking}
        try:
            with quiet():
                returned = type(config)(**self._read(official, variant))
            again: Mapping[str, Any] = {name: getattr(returned, name) for name in axes_of(returned)}
        except ValueError as error:
            if not lines:  # else it follows from them
                lines[""] = str(error).removeprefix("config.json: ")
            again = fixed
        free = NOT_COMPUTED | {*self.settings.without_effect}
        free |= frozenset() if head.writes_text else OF_LANGUAGE_MODELS
        for name in axes_of(config):
            value = getattr(config, name)
            if again.get(name, value) != value and name not in lines and (name in fixed or name not in free):
                lines[name] = f"{name} must be {again[name]!r}, not {value!r}"
        return list(lines.values())

    def has_topology_of(self, config: PretrainedConfig) -> bool:
        """Whether one of the heads is for configs of this `model_type`."""
        return any(head.config_class.model_type == config.model_type for head in self.heads)

    def _read(self, official: Mapping[str, Any], variant: CheckpointVariant) -> dict[str, Any]:
        return self.settings.read(official, variant, self.names.head(variant))


def _config_of(heads: Sequence[Head]) -> str:
    """`LlamaConfig` for `LlamaForCausalLM`; "" where the installed transformers has none of the classes."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "Config", heads[0].official) if heads else ""
