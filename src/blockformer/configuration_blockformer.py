"""The configuration: one base whose fields are the axes of the core; each topology has a class in a file of its own.

A field is checked when the config is made, before any memory is taken. No field names a model family: a family is a
choice of values (see `presets.py`).
"""

import os
from typing import ClassVar

from transformers import PretrainedConfig

from .compat import tell_peft
from .config_checks import (
    check_combination,
    check_dtype,
    check_names,
    check_rope,
    check_sizes,
    check_values,
    parse_config_json,
)


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
        position_type: how the model learns of order, one of `config_checks.CHOICES`.
        max_position_embeddings: tokens of context: size of a learned table, training length of rotary positions.
        rope_parameters: for rotary positions, {"rope_type": ..., "rope_theta": ..., ...} as in transformers.
        position_offset: rows at the head of a learned table, before that of position 0; padding takes the last of them
            where a head reads its states.
        type_vocab_size: number of token types (segments); 0 means none.
        relative_attention_num_buckets: buckets of a relative bias.
        relative_attention_max_distance: distance, in tokens, beyond which all share the last bucket.
        relative_bias_per_layer: a relative bias of its own in every layer, instead of one for all of a stack's layers.
        qk_norm: whether queries and keys are normalised per head before the rotation.
        attention_bias: bias on the query, key and value projections.
        attention_output_bias: bias on the attention's output projection.
        mlp_bias: bias on the feed-forward projections.
        float32_down_proj: keep the down projections in float32 in a model that is loaded in float16.
        lm_head_bias: bias on the language model head; "fixed" is one that does not learn (the `final_logits_bias` of
            BART).
        attention_scale: factor of the attention scores; None means 1/sqrt(head_dim).
        embedding_norm: a norm on the sum of the embeddings.
        embedding_scale: factor of the token embeddings; None means 1.
        lm_head_transform: norm(act(dense(x))) before the language model head.
        pooler_act: activation of an encoder's pooler, a linear layer on the first token's state; None means no pooler.
        logit_scale: factor of the states that enter the language model head; a config file's null is read as 1.
        final_norm: a norm after the last layer; None means yes for "pre" and no for "post".
        sliding_window: tokens that a layer of type "sliding_attention" looks back, itself included; 2 or more, in a
            decoder alone.
        layer_types: "full_attention" or "sliding_attention" for each layer; None means all sliding when there is a
            sliding window, else all full.
        hidden_dropout: after the embeddings and after each sub-layer.
        attention_dropout: on the attention probabilities.
        activation_dropout: between the two projections of the feed-forward network.
        linear_bits: 4 keeps the weights of the layers' linear maps in 4 bits, which do not learn; None: plain ones.
        linear_group_size: inputs of such a map that share a scale; -1 means all of them.
        classifier_dropout: before a token classification head; None means `hidden_dropout`.
        initializer_range: standard deviation of fresh weights; None means 1/sqrt(inputs) for each matrix and 1 for
            embeddings.
        use_cache: whether a decoder returns its keys and values.
        tie_word_embeddings: whether the language model head is the embedding matrix.

    Raises:
        ValueError: an unknown field (with the nearest known name), a value out of range, fields that contradict each
            other, or sizes that no machine holds.
    """

    keys_to_ignore_at_inference = ["past_key_values"]
    auto_classes: ClassVar[dict] = {}
    base_model_pp_plan: ClassVar[dict] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

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
    position_offset: int = 0
    type_vocab_size: int = 0
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_bias_per_layer: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    float32_down_proj: bool = False
    lm_head_bias: bool | str = False
    attention_scale: float | None = None
    embedding_norm: bool = False
    embedding_scale: float | None = None
    lm_head_transform: bool = False
    pooler_act: str | None = None
    logit_scale: float | None = 1.0
    final_norm: bool | None = None
    sliding_window: int | None = None
    layer_types: list | None = None
    add_cross_attention: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    classifier_dropout: float | None = None
    linear_bits: int | None = None
    linear_group_size: int = 128
    initializer_range: float | None = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self, **kwargs):
        check_names(type(self), kwargs)
        if self.logit_scale is None:  # of older repos; vLLM multiplies by it
            self.logit_scale = 1.0
        check_values(self)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self._whole_head_dim()
        deepest = max(self.num_hidden_layers, getattr(self, "decoder_layers", 0))
        check_sizes(self.num_parameters_estimate(), deepest, kwargs.get("num_labels"))
        if self.norm_bias is None:
            self.norm_bias = self.norm_type == "layer_norm"
        if self.final_norm is None:
            self.final_norm = self.norm_placement != "post"
        if self.layer_types is None:
            layer_type = "sliding_attention" if self.sliding_window else "full_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers
        check_dtype(self.dtype if self.dtype is not None else kwargs.get("torch_dtype"))
        self._settle_rope(kwargs)
        check_combination(self)
        super().__post_init__(**kwargs)
        if self.position_type != "rotary":
            self.rope_parameters = None
        self.base_model_tp_plan = self._tensor_parallel_plan(self.add_cross_attention)

    @classmethod
    def _dict_from_json_file(cls, json_file):
        with open(json_file, encoding="utf-8") as file:
            return parse_config_json(file.read(), str(json_file))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As the library does it; the file that `AutoConfig` read before it knew the class is read again, strictly."""
        path = os.path.join(str(kwargs.get("name_or_path") or ""), "config.json")
        if kwargs.get("name_or_path") and os.path.isfile(path):
            cls._dict_from_json_file(path)
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self):
        """The fields as plain data, with the `auto_map` by which a repo of this config finds its code."""
        # PEFT asks for this before it looks for target modules: here it is imported for sure, whichever came first.
        tell_peft(self.model_type)
        fields = super().to_dict()
        fields["auto_map"] = {**self.auto_classes, **(fields.get("auto_map") or {})}
        return fields

    def _whole_head_dim(self) -> int:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}): change one of them or set head_dim."
            )
        return self.hidden_size // self.num_attention_heads

    def _settle_rope(self, kwargs: dict) -> None:
        """Take rotary parameters also under their old name, and as a copy: the base class writes into the dict."""
        rope = kwargs.pop("rope_scaling", None) or self.rope_parameters
        rope_theta = kwargs.get("rope_theta")
        check_rope(self, rope, rope_theta)
        self.rope_parameters = dict(rope or {})
        if self.position_type != "rotary":
            kwargs.pop("rope_theta", None)

    def _tensor_parallel_plan(self, has_cross_attention: bool) -> dict:
        """How the modules of one stack are shared out: each process has some of the heads and of the inner states.

        What belongs to no single head (a norm, relative terms) is whole in each process, and its gradients are added.
        """
        shared = "replicated_with_grad_allreduce"
        plan: dict[str, str] = {}
        for attention in ("self_attn", "cross_attn")[: 1 + has_cross_attention]:
            plan |= {f"layers.*.{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
            if self.qk_norm:
                plan |= {f"layers.*.{attention}.{name}": shared for name in ("q_norm", "k_norm")}
            plan[f"layers.*.{attention}.o_proj"] = "rowwise"
        if self.position_type in ("relative_key", "relative_key_query"):
            plan["layers.*.self_attn.relative_keys.embedding"] = shared
        elif self.position_type == "relative_bias":
            owner = "layers.*.self_attn." if self.relative_bias_per_layer else ""
            plan[f"{owner}relative_bias.embedding"] = shared
        if self.gated_mlp:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        return {**plan, "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    def num_parameters_estimate(self) -> int:
        """Weights of the matrices, without building the model: biases and norms, below 1%, are left out."""
        width = self.hidden_size
        embeddings = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        tables = {
            "learned": (self.max_position_embeddings + self.position_offset) * width,
            "relative_bias": self.relative_attention_num_buckets * self.num_attention_heads,
        }
        positions = tables.get(self.position_type, 0) + self.type_vocab_size * width
        return self.num_hidden_layers * self._layer_estimate(self.add_cross_attention) + embeddings + positions

    def _layer_estimate(self, has_cross_attention: bool) -> int:
        """Weights of one layer's matrices."""
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        attention = width * self.head_dim * 2 * (heads + kv_heads)
        mlp = width * self.intermediate_size * (3 if self.gated_mlp else 2)
        relative_keys = self.position_type in ("relative_key", "relative_key_query")
        positions = 2 * self.max_position_embeddings * self.head_dim if relative_keys else 0
        return attention * (2 if has_cross_attention else 1) + mlp + positions
