"""The configuration: one base whose fields are the axes of the core, one class for each topology.

A field is checked when the config is made, before any memory is taken. No field names a model family: a family is a
choice of values (see `presets.py`).
"""

import difflib
import json
import math
import os
from typing import ClassVar

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from .compat import config_field_names, generation_field_names

NORM_TYPES = ("layer_norm", "rms_norm")
NORM_PLACEMENTS = ("pre", "post")
POSITION_TYPES = (
    "learned",
    "sinusoidal",
    "rotary",
    "relative_bias",
    "relative_key",
    "relative_key_query",
    "none",
)
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DTYPES = ("float32", "float16", "bfloat16", "float64")

_POSITIVE_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "relative_attention_max_distance",
)
_FLAGS = (
    "gated_mlp",
    "norm_bias",
    "qk_norm",
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
    "lm_head_bias",
    "embedding_norm",
    "final_norm",
    "add_cross_attention",
    "use_cache",
    "tie_word_embeddings",
)
_PROBABILITIES = ("hidden_dropout", "attention_dropout", "activation_dropout", "classifier_dropout")
_SCALES = ("attention_scale", "embedding_scale", "logit_scale")
_CHOICES = {
    "norm_type": NORM_TYPES,
    "norm_placement": NORM_PLACEMENTS,
    "position_type": POSITION_TYPES,
}

# What the base class or the loading code understands beyond the declared fields.
_INHERITED_ARGUMENTS = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path attn_implementation auto_map experts_implementation model_type
    name_or_path num_labels output_attentions per_layer_config quantization_config rope_scaling rope_theta
    tie_last_hidden_states torch_dtype transformers_version
    """.split()
)

# A size whose weights in bfloat16 would pass this many times the machine's memory is taken for a slip of the keyboard.
_MEMORY_MULTIPLE = 256


class BlockformerConfig(PretrainedConfig):
    """What all topologies share: sizes and the axes of choice. Use one of its subclasses.

    Args:
        vocab_size: number of tokens V.
        hidden_size: width C of the residual stream.
        intermediate_size: inner width of the feed-forward network.
        num_hidden_layers: number of layers.
        num_attention_heads: query heads H.
        num_key_value_heads: key/value heads K, a divisor of H; None means H (plain multi-head attention).
        head_dim: size D of a head; None means `hidden_size / num_attention_heads`.
        hidden_act: activation of the feed-forward network, a name of `transformers.activations.ACT2FN`.
        gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
        norm_type: "rms_norm" or "layer_norm".
        norm_placement: "pre" is `x + f(norm(x))`, "post" is `norm(x + f(x))`.
        norm_eps: added to the variance before the square root.
        norm_bias: whether a layer norm has a bias; None means yes. An RMS norm has none.
        position_type: how the model learns of order, one of `POSITION_TYPES`.
        max_position_embeddings: tokens of context: the size of a learned table, the training length of rotary positions.
        rope_parameters: for rotary positions, {"rope_type": ..., "rope_theta": ..., ...} as in transformers.
        relative_attention_num_buckets: buckets of a relative bias.
        relative_attention_max_distance: distance, in tokens, beyond which all share the last bucket.
        qk_norm: whether queries and keys are normalised per head before the rotation.
        attention_bias: bias on the query, key and value projections.
        attention_output_bias: bias on the attention's output projection.
        mlp_bias: bias on the feed-forward projections.
        lm_head_bias: bias on the language model head.
        attention_scale: factor of the attention scores; None means 1/sqrt(head_dim).
        embedding_norm: a norm on the sum of the embeddings.
        embedding_scale: factor of the token embeddings; None means 1.
        logit_scale: factor of the states that enter the language model head; None means 1.
        final_norm: a norm after the last layer; None means yes for "pre" and no for "post".
        sliding_window: tokens that a layer of type "sliding_attention" looks back, itself included.
        layer_types: "full_attention" or "sliding_attention" for each layer; None means all sliding when there is a
            sliding window, else all full.
        hidden_dropout: after the embeddings and after each sub-layer.
        attention_dropout: on the attention probabilities.
        activation_dropout: between the two projections of the feed-forward network.
        classifier_dropout: before a token classification head; None means `hidden_dropout`.
        initializer_range: standard deviation of fresh weights.
        use_cache: whether a decoder returns its keys and values.
        tie_word_embeddings: whether the language model head is the embedding matrix.

    Raises:
        ValueError: an unknown field (with the nearest known name), a value out of range, fields that contradict each
            other, or sizes far beyond the machine's memory.
    """

    keys_to_ignore_at_inference = ("past_key_values",)
    auto_classes: ClassVar[dict] = {}

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    gated_mlp: bool = True
    norm_type: str = "rms_norm"
    norm_placement: str = "pre"
    norm_eps: float = 1e-6
    norm_bias: bool | None = None
    position_type: str = "rotary"
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    attention_scale: float | None = None
    embedding_norm: bool = False
    embedding_scale: float | None = None
    logit_scale: float | None = None
    final_norm: bool | None = None
    sliding_window: int | None = None
    layer_types: list | None = None
    add_cross_attention: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    classifier_dropout: float | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        self._check_values()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self._default_head_dim()
        if self.norm_bias is None:
            self.norm_bias = self.norm_type == "layer_norm"
        if self.final_norm is None:
            self.final_norm = self.norm_placement == "pre"
        if self.layer_types is None:
            layer_type = "sliding_attention" if self.sliding_window else "full_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers
        self._check_rope(kwargs)
        self._check_dtype(kwargs)
        super().__post_init__(**kwargs)
        if self.position_type != "rotary":
            self.rope_parameters = None
        self._check_combination()
        self._check_memory()

    @classmethod
    def _dict_from_json_file(cls, json_file):
        with open(json_file, encoding="utf-8") as file:
            return parse_config_json(file.read(), str(json_file))

    def to_dict(self):
        """The fields as plain data, with the `auto_map` by which a repo of this config finds its code."""
        fields = super().to_dict()
        code = {name: target for name, target in self.auto_classes.items()}
        fields["auto_map"] = {**code, **(fields.get("auto_map") or {})}
        return fields

    def _refuse_unknown(self, kwargs: dict) -> None:
        known = config_field_names(type(self)) | _INHERITED_ARGUMENTS
        for name in kwargs:
            if name in known or name in generation_field_names() or name.startswith("_"):
                continue
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"{type(self).__name__} has no field '{name}'.{hint}")

    def _default_head_dim(self) -> int:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}): change one of them or set head_dim."
            )
        return self.hidden_size // self.num_attention_heads

    def _check_values(self) -> None:
        optional = {"num_key_value_heads", "head_dim", "norm_bias", "final_norm", "classifier_dropout", *_SCALES}
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if not (value is None and name in optional) and (not _is_integer(value) or value <= 0):
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if not _is_integer(self.relative_attention_num_buckets) or self.relative_attention_num_buckets <= 1:
            raise ValueError(
                f"relative_attention_num_buckets must be an integer above 1, not {self.relative_attention_num_buckets!r}."
            )
        for name in _FLAGS:
            value = getattr(self, name)
            if not (value is None and name in optional) and not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, not {value!r}.")
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if not (value is None and name in optional) and not (_is_finite(value) and 0 <= value <= 1):
                raise ValueError(f"{name} must be a probability from 0 to 1, not {value!r}.")
        for name in ("norm_eps", "initializer_range", *_SCALES):
            value = getattr(self, name)
            if not (value is None and name in optional) and not (_is_finite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, not {value!r}.")
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        _check_choice("hidden_act", self.hidden_act, tuple(ACT2FN))
        if self.sliding_window is not None and (not _is_integer(self.sliding_window) or self.sliding_window <= 0):
            raise ValueError(
                f"sliding_window must be a positive number of tokens or None, not {self.sliding_window!r}."
            )
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            for token in value if name == "eos_token_id" and isinstance(value, list | tuple) else [value]:
                if token is not None and (not _is_integer(token) or not 0 <= token < self.vocab_size):
                    raise ValueError(f"{name} must be a token from 0 to {self.vocab_size - 1}, not {token!r}.")

    def _check_rope(self, kwargs: dict) -> None:
        given = {name: kwargs[name] for name in ("rope_scaling", "rope_theta") if kwargs.get(name) is not None}
        if self.rope_parameters is not None:
            given["rope_parameters"] = self.rope_parameters
        if self.position_type != "rotary":
            if given:
                raise ValueError(
                    f"{next(iter(given))} is set but position_type is '{self.position_type}': drop it, or set "
                    "position_type='rotary'."
                )
            kwargs.pop("rope_scaling", None)
            kwargs.pop("rope_theta", None)
            return
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters must be a dict, not {rope!r}.")
        # The base class completes the dict in place; the caller's own stays as it is.
        self.rope_parameters = dict(rope)
        _check_choice("rope_type", rope.get("rope_type", rope.get("type", "default")), ROPE_TYPES)
        for name in ("rope_theta", "factor"):
            value = rope.get(name, given.get(name, 1.0))
            if not (_is_finite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, not {value!r}.")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not supported: the rotation covers the whole head; drop it.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even with rotary positions: they rotate pairs.")

    def _check_dtype(self, kwargs: dict) -> None:
        for value in (self.dtype, kwargs.get("torch_dtype")):
            if value is not None and str(value).removeprefix("torch.") not in DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {value!r}.")

    def _check_combination(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}): each key/value head serves the same number of query heads."
            )
        if self.norm_type == "rms_norm" and self.norm_bias:
            raise ValueError("norm_bias=True needs norm_type='layer_norm': an RMS norm has no bias.")
        if self.norm_placement == "post" and self.final_norm:
            raise ValueError(
                "final_norm=True with norm_placement='post': each layer already ends in a norm; set final_norm=False."
            )
        if self.tie_word_embeddings and self.lm_head_bias:
            raise ValueError("lm_head_bias=True needs tie_word_embeddings=False.")
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if not isinstance(self.layer_types, list) or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must list one type for each of the {self.num_hidden_layers} layers, not {self.layer_types!r}."
            )
        for layer_type in self.layer_types:
            _check_choice("layer_types", layer_type, LAYER_TYPES)
        slides = "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError(
                "layer_types names 'sliding_attention' but sliding_window is None: set its length in tokens."
            )
        if self.sliding_window is not None and not slides:
            raise ValueError("sliding_window is set but no layer is of type 'sliding_attention': set layer_types too.")
        if slides and self.position_type.startswith("relative"):
            raise ValueError(f"sliding attention is not supported with position_type='{self.position_type}'.")

    def _check_memory(self) -> None:
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return
        needed = 2 * self.num_parameters_estimate()
        if needed > _MEMORY_MULTIPLE * memory:
            raise ValueError(
                f"these sizes need about {needed / 2**40:,.0f} TiB in bfloat16, this machine has {memory / 2**30:,.0f} GiB: "
                "check vocab_size, hidden_size, intermediate_size, num_hidden_layers and max_position_embeddings."
            )

    def num_parameters_estimate(self) -> int:
        """Weights of the matrices, without building the model: biases and norms, below 1%, are left out."""
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        attention = width * self.head_dim * 2 * (heads + kv_heads)
        mlp = width * self.intermediate_size * (3 if self.gated_mlp else 2)
        layer = attention * (2 if self.add_cross_attention else 1) + mlp
        embeddings = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        positions = self.max_position_embeddings * width if self.position_type == "learned" else 0
        return self.num_hidden_layers * layer + embeddings + positions


class BlockformerDecoderConfig(BlockformerConfig):
    """A decoder: causal self-attention, with `add_cross_attention` also a look at an encoder's states.

    Takes the fields of `BlockformerConfig`. The defaults are a small Llama-style model.

    Example:
        >>> config = BlockformerDecoderConfig(hidden_size=256, num_attention_heads=4, qk_norm=True)
        >>> config.head_dim
        64
    """

    model_type = "blockformer_decoder"
    auto_classes = {
        "AutoConfig": "configuration_blockformer.BlockformerDecoderConfig",
        "AutoModel": "modeling_blockformer.BlockformerDecoderModel",
        "AutoModelForCausalLM": "modeling_blockformer.BlockformerDecoderForCausalLM",
        "AutoModelForSequenceClassification": "modeling_blockformer.BlockformerDecoderForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_blockformer.BlockformerDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_blockformer.BlockformerDecoderForQuestionAnswering",
    }
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }


def parse_config_json(text: str, source: str) -> dict:
    """Parse a config file strictly.

    Raises:
        ValueError: `source` is no JSON object, has a key twice, or holds NaN or Infinity.
    """

    def refuse_constant(name):
        raise ValueError(f"{source}: {name} is no JSON value; use a number or null.")

    def refuse_duplicates(pairs):
        fields = dict(pairs)
        if len(fields) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(f"{source}: the key {twice[0]!r} stands there twice; keep one.")
        return fields

    try:
        fields = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{source} must hold a JSON object, not {type(fields).__name__}.")
    return fields


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_choice(name: str, value, choices: tuple) -> None:
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.{hint}")
