"""What the encoders after BERT share: heads, settings, and the several ways in which their checkpoints spell names.

A checkpoint may leave out the prefix of its encoder or have one where the official class has none, may call the weights
of norms `gamma` and `beta`, and may hold the bias of its language model head once or twice. What of this it does is its
`Form`; the rules are written for the names that the official classes of today use.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConversionError, shown
from ..rules.operations import Copies
from ..rules.table import Rule, RuleTable, module_rules
from .base import Family, Form, common_entries, token_or_none, unequal
from .encoder_heads import LM, NSP, SETTINGS, EncoderHead, LanguageModelNames

OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
RELATIVE = ("relative_key", "relative_key_query")
HEADS_OF_ROWS = ("classifier.", "pre_classifier.", "qa_outputs.")


class EncoderFamily(Family[EncoderHead]):
    """An encoder after BERT.

    Args:
        name: the official `model_type`.
        config_class: name of the official configuration class.
        root: prefix of the encoder's tensors in models with a head.
        heads: what its models are for; the stack alone stands first.
        embeddings: official module of the embeddings -> ours.
        layer: prefix of a layer's tensors, with `{layer}`.
        modules: official module of a layer -> ours, each with weight and bias.
        language_model: the names of that head.
        fields: official field -> ours.
        settings: our fields that this family never varies, beyond the shared ones.
        pooler_act: activation of the pooler.
        relative_key: official name, in a layer, of the table of relative keys; "" for a family without.
        shifted: whether positions begin after the padding token's id.
    """

    spoken = ("position_embedding_type",)

    def __init__(
        self,
        name: str,
        config_class: str,
        root: str,
        heads: Sequence[EncoderHead],
        embeddings: Mapping[str, str],
        layer: str,
        modules: Mapping[str, str],
        language_model: LanguageModelNames,
        fields: Mapping[str, str],
        settings: Mapping[str, Any] | None = None,
        pooler_act: str = "tanh",
        relative_key: str = "",
        shifted: bool = False,
    ):
        super().__init__(name, config_class, heads)
        self.root = root
        self.embeddings = dict(embeddings)
        self.layer = layer
        self.modules = dict(modules)
        self.language_model = language_model
        self.fields = dict(fields)
        self.settings = {**SETTINGS, **(settings or {})}
        self.pooler_act = pooler_act
        self.relative_key = relative_key
        self.shifted = shifted
        self._inner = ("embeddings.", layer.partition(".")[0] + ".", "pooler.")

    # The form: which head, which names.

    def form(self, official, names: Collection[str] | None = None, read=None):
        """See `Family.form`. A head that the tensors hold beyond what `architectures` says is taken too."""
        head = self._head(official, names)
        traits = {"decoder"} if head.is_decoder else set()
        if official.get("position_embedding_type") in RELATIVE:
            traits.add("relative")
        if official.get("tie_word_embeddings", True) is False:
            traits.add("untied")
        if names is None:
            return Form(head.official, frozenset(traits | ({"pooler"} if head.pooler != "unused" else set())))
        if any(name.endswith(tuple(OLD_NORMS)) for name in names):
            traits.add("gamma and beta")
        if head.bare and any(name.startswith(self.root) for name in names):
            traits.add("prefix")
        if not head.bare and not any(name.startswith(self.root) for name in names):
            traits.add("no prefix")
        form = Form(head.official, frozenset(traits))
        found = {self.canonical(name, form) for name in names}
        if self._root(head) + "pooler.dense.weight" in found:
            traits.add("pooler")
        if self.language_model.copy and self.language_model.copy in found:
            # Where nothing is tied, the official class adds the second one and never looks at the first.
            both = self.language_model.bias in found and "untied" not in traits
            traits.add("both biases" if both else "second bias")
        return Form(head.official, frozenset(traits))

    def _head(self, official: Mapping[str, Any], names: Collection[str] | None) -> EncoderHead:
        is_decoder = official.get("is_decoder", False) is True
        architectures = official.get("architectures") or [None]
        known = [head for head in self.heads if head.is_decoder == is_decoder]
        chosen = [head for head in known if head.official == architectures[0]]
        if architectures[0] is not None and (len(architectures) != 1 or not chosen):
            raise ConversionError(
                f"config.json: architectures is {shown(architectures)}, which cannot be converted; of '{self.name}' "
                f"with is_decoder {'true' if is_decoder else 'false'} there are "
                f"{', '.join(head.official for head in known) or 'none'}"
            )
        names = names or ()
        modules = {LM: self.language_model.dense, NSP: "cls.seq_relationship"}
        held = {part for part, module in modules.items() if any(name.startswith(module + ".") for name in names)}
        if chosen and (chosen[0].modules or not held):
            return chosen[0]
        if not chosen and any(name.startswith(HEADS_OF_ROWS) for name in names):
            raise ConversionError(
                "config.json: architectures is missing, and the tensors alone do not say what the head is for; "
                f"set it to one of {', '.join(head.official for head in known)}"
            )
        parts = frozenset(held) | (chosen[0].parts if chosen else frozenset())
        plain = [head for head in known if head.parts == parts and not head.modules]
        return plain[0] if plain else (chosen or known)[0]

    def form_for(self, config, earlier: Form | None = None):
        """See `Family.form_for`."""
        head = self._head_for(config)
        if head is None:
            return super().form_for(config)
        traits = {"decoder"} if head.is_decoder else set()
        if config.pooler_act is not None and not head.own_pooler:
            traits.add("pooler")
        if config.position_type in RELATIVE:
            traits.add("relative")
        if not config.tie_word_embeddings:
            traits.add("untied")
        shared = {"relative", "untied"} | (set() if head.own_pooler or head.is_decoder else {"pooler"})
        if earlier is not None and earlier.head == head.official and earlier.traits & shared == traits & shared:
            return earlier
        if not config.tie_word_embeddings and self.language_model.copy:
            traits.add("both biases")
        return Form(head.official, frozenset(traits))

    def head(self, form):
        """See `Family.head`."""
        sides = [head for head in self.heads if head.official == form.head]
        return next(head for head in sides if head.is_decoder == ("decoder" in form.traits))

    def _head_for(self, config: PretrainedConfig) -> EncoderHead | None:
        """The head that a config of ours is for; its topology's first where it does not say."""
        known = [head for head in self.heads if head.is_decoder == config.is_decoder]
        if config.architectures:
            known = [head for head in known if head.ours == config.architectures[0]]
        return known[0] if known else None

    def _root(self, head: EncoderHead) -> str:
        return "" if head.bare else self.root

    def canonical(self, name, form):
        """See `Family.canonical`."""
        if "gamma and beta" in form.traits:
            for old, new in OLD_NORMS.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
        if "prefix" in form.traits:
            return name.removeprefix(self.root)
        if "no prefix" in form.traits and name.startswith(self._inner):
            return self.root + name
        return name

    def stored(self, name, form):
        """See `Family.stored`."""
        if "gamma and beta" in form.traits:
            for old, new in OLD_NORMS.items():
                name = name.removesuffix(new) + old if name.endswith(new) else name
        if "prefix" in form.traits and name.startswith(self._inner):
            return self.root + name
        if "no prefix" in form.traits:
            return name.removeprefix(self.root)
        return name

    # The tensors.

    def rules_for(self, form):
        """See `Family.rules_for`."""
        head = self.head(form)
        root, prefix = self._root(head), "" if head.bare else "model."
        ignored = [root + "embeddings.position_ids", root + "embeddings.token_type_ids"]
        rules = [*module_rules({root + "embeddings.LayerNorm": prefix + "embedding_norm"})]
        for theirs, ours in self.embeddings.items():
            if theirs == "embeddings.position_embeddings" and "relative" in form.traits:
                ignored.append(f"{root}{theirs}.weight")
            else:
                rules.append(Rule(f"{root}{theirs}.weight", f"{prefix}{ours}.weight"))
        here, there = root + self.layer, prefix + "layers.{layer}."
        rules += module_rules({here + theirs: there + ours for theirs, ours in self.modules.items()})
        if self.relative_key:
            rules.append(Rule(here + self.relative_key, there + "self_attn.relative_keys.embedding.weight"))
        if head.own_pooler or head.is_decoder:
            ignored += [root + "pooler.dense.weight", root + "pooler.dense.bias"]
        else:
            rules += module_rules({root + "pooler.dense": prefix + "pooler.dense"})
        if head.own_pooler:
            rules += module_rules({head.own_pooler: prefix + "pooler.dense"})
        rules += module_rules(head.modules)
        if LM in head.parts:
            rules += self._language_model_rules(form, ignored)
        if NSP in head.parts:
            rules += module_rules({"cls.seq_relationship": "next_sentence_score"})
        return RuleTable(rules, ignored=ignored)

    def _language_model_rules(self, form: Form, ignored: list[str]) -> list[Rule]:
        names = self.language_model
        rules = module_rules({names.dense: "lm_head_transform.dense", names.norm: "lm_head_transform.norm"})
        rules.append(Rule(names.weight, "lm_head.weight"))
        if "both biases" in form.traits:
            rules.append(Rule((names.bias, names.copy), "lm_head.bias", Copies(2)))
        elif "second bias" in form.traits:
            ignored.append(names.bias)
            rules.append(Rule(names.copy, "lm_head.bias"))
        else:
            rules.append(Rule(names.bias, "lm_head.bias"))
        return rules

    def optional(self, form):
        """See `Family.optional`. A pooler that the head does not read may be lost in training."""
        head = self.head(form)
        pooler = [f"{self._root(head)}pooler.dense.{kind}" for kind in ("weight", "bias")]
        biases = (self.language_model.bias, self.language_model.copy) if self.language_model.copy else ()
        return (*biases, *(pooler if head.pooler == "unused" else ()))

    def adjust(self, shapes, form, config):
        """See `Family.adjust`."""
        head = self.head(form)
        root, width = self._root(head), config.hidden_size
        if "pooler" in form.traits and not head.own_pooler and not head.is_decoder:
            shapes[root + "pooler.dense.weight"], shapes[root + "pooler.dense.bias"] = (width, width), (width,)
        if "relative" in form.traits:
            shapes.pop(root + "embeddings.position_embeddings.weight")
            for layer in range(config.num_hidden_layers):
                name = root + (self.layer + self.relative_key).replace("{layer}", str(layer))
                shapes[name] = (2 * config.max_position_embeddings - 1, config.head_dim)
        return shapes

    def check_ignored(self, name, tensor: Tensor):
        """See `Family.check_ignored`."""
        count = torch.arange(tensor.numel()).to(tensor.dtype)
        if name.endswith("embeddings.position_ids") and not torch.equal(tensor.flatten(), count):
            return "does not count 0, 1, 2, ..., so the positions are not those that the official class computes"
        if name.endswith("embeddings.token_type_ids") and tensor.any():
            return "is not zero everywhere, so the token types are not those that the official class takes by default"
        return None

    def official_arguments(self, form):
        """See `Family.official_arguments`."""
        head = self.head(form)
        has_choice = head.bare and any(other.pooler == "usual" for other in self.heads)
        return {"add_pooling_layer": "pooler" in form.traits and not head.is_decoder} if has_choice else {}

    def not_runnable(self, config):
        """See `Family.not_runnable`."""
        if config.position_type not in RELATIVE:
            return None
        return f"transformers has dropped position_embedding_type '{config.position_type}'"

    # The config.

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        self.refuse_unsupported(official)
        form = form or self.form(official)
        head = self.head(form)
        config = self.official_config(official)
        settings = {**self.settings, "architectures": [head.ours]}
        settings.update({ours: getattr(config, theirs) for theirs, ours in self.fields.items()})
        settings["pad_token_id"] = token_or_none(settings["pad_token_id"])
        settings["position_type"] = self._position_type(official)
        settings["position_offset"] = self._offset(settings)
        settings["max_position_embeddings"] -= settings["position_offset"]
        has_pooler = head.own_pooler or head.pooler == "needed" or "pooler" in form.traits
        settings["pooler_act"] = self.pooler_act if has_pooler and not head.is_decoder else None
        settings["classifier_dropout"] = self.dropout_from(config, head)
        if head.is_decoder:
            settings["add_cross_attention"] = config.add_cross_attention
        elif official.get("add_cross_attention"):
            raise ConversionError("config.json: add_cross_attention is true but is_decoder is not; set both or neither")
        settings.update(common_entries(config))
        if LM in head.parts:
            self.check_language_model(settings)
        self.our_config(settings)
        return settings

    def _position_type(self, official: Mapping[str, Any]) -> str:
        kind = official.get("position_embedding_type") or "absolute"
        if kind == "absolute":
            return "learned"
        if kind in RELATIVE and self.relative_key:
            return kind
        known = ", ".join(["absolute", *(RELATIVE if self.relative_key else ())])
        raise ConversionError(f"config.json: position_embedding_type must be one of {known}, not {shown(kind)}")

    def _offset(self, settings: Mapping[str, Any]) -> int:
        """Rows at the head of the table of positions that no token takes."""
        if not self.shifted or settings["position_type"] != "learned":
            return 0
        if settings["pad_token_id"] is None:
            raise ConversionError("config.json: pad_token_id must be set: the positions begin after it")
        return settings["pad_token_id"] + 1

    def shift(self, config):
        """See `Family.shift`."""
        return config.position_offset

    def dropout_from(self, official: PretrainedConfig, head: EncoderHead) -> float | None:
        """Our `classifier_dropout`."""
        return official.classifier_dropout

    def dropout_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official entries for our `classifier_dropout`."""
        return {"classifier_dropout": config.classifier_dropout}

    def check_language_model(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings with which the official language model head differs from ours."""

    def differences(self, config):
        """See `Family.differences`."""
        head = self._head_for(config)
        if head is None:
            sides = sorted({"decoder" if head.is_decoder else "encoder" for head in self.heads})
            ours = ", ".join(dict.fromkeys(head.ours for head in self.heads))
            return [f"it must be an {' or '.join(sides)} with architectures one of {ours}"]
        wanted = {
            **self.settings,
            "num_key_value_heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "position_offset": config.position_offset,
        }
        if head.pooler == "needed" or head.own_pooler or (config.pooler_act is not None and not head.is_decoder):
            wanted["pooler_act"] = self.pooler_act
        if LM not in head.parts:
            del wanted["lm_head_transform"], wanted["lm_head_bias"]
        try:
            wanted["position_offset"] = self._offset(config.to_dict())
        except ConversionError:
            return ["pad_token_id must be set"]
        lines = unequal(config, wanted)
        kinds = ("learned", *(RELATIVE if self.relative_key else ()))
        if config.position_type not in kinds:
            lines.append(f"position_type must be one of {', '.join(kinds)}, not '{config.position_type}'")
        if "type_vocab_size" in self.fields.values() and config.type_vocab_size < 1:
            lines.append("type_vocab_size must be 1 or more, not 0")
        if LM in head.parts:
            try:
                self.check_language_model(config.to_dict())
            except ConversionError as error:
                lines.append(str(error))
        return lines

    def config_to(self, config):
        """See `Family.config_to`."""
        self.check_expressible(config)
        head = self.head(self.form_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.name}
        official.update({theirs: getattr(config, ours) for theirs, ours in self.fields.items()})
        official["max_position_embeddings"] += config.position_offset
        official.update(self.dropout_to(config))
        if config.position_type in RELATIVE:
            official["position_embedding_type"] = config.position_type
        if head.is_decoder:
            official.update(is_decoder=True, add_cross_attention=config.add_cross_attention)
        official.update(common_entries(config))
        self.official_config(official)
        return official
