"""The configuration: one base for all topologies, each of which has a class in its own file.

A field is declared once, by `axis`: the fields of a part of the model next to the part, of the whole model here.
All are checked when the config is made, before any memory is taken. No field names a family, which is only values.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PretrainedConfig

from .attention import AttentionFields
from .axes import BLOCKS, FLAG, axes, axis, blocks_of, check_choice, did_you_mean, flag, is_integer, parts_of
from .compat import generation_field_names
from .feed_forward import ACT2FN, FeedForward, FeedForwardFields
from .layer import LayerFields
from .normalization import NormFields
from .positions import LEARNED, RELATIVE_BIAS, RELATIVE_KEYS, SINUSOIDAL, PositionFields
from .relative_bias import RelativeBias, RelativeBiasFields
from .relative_keys import RelativeKeys
from .release import FORMAT, STAMP, VERSION
from .rotary import RotaryFields, make_rotary
from .runtime import by_package
from .scaled_embedding import ScaledEmbeddingFields
from .sinusoidal import SinusoidalPositions
from .vector_positions import LearnedPositions, VectorPositionFields

DTYPES = ("float32", "float16", "bfloat16", "float64")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# What the base class or the loading code understands beyond the declared fields.
INHERITED_ARGUMENTS = frozenset(
    "attn_implementation auto_map experts_implementation model_type name_or_path num_labels output_attentions "
    "quantization_config rope_scaling rope_theta tie_last_hidden_states torch_dtype".split()
)
BY_WAY_OF = "with_blocks."  # the module of the `auto_map` where there are blocks from outside
# Per-layer lists that follow a number of layers, where all entries are alike.
_LISTS = {"num_hidden_layers": ("layer_types", "mlp_layer_types"), "decoder_layers": ("decoder_layer_types",)}
_FORMER = {"linear_bits": None, "linear_group_size": 128}  # of older repos, never anything else but in a decoder


class BlockformerConfig(
    ScaledEmbeddingFields,
    NormFields,
    RotaryFields,
    RelativeBiasFields,
    VectorPositionFields,
    PositionFields,
    AttentionFields,
    FeedForwardFields,
    LayerFields,
    PretrainedConfig,
):
    """What all topologies share: sizes and the axes of choice. Use one of its subclasses.

    Raises:
        ValueError: an unknown field, a value out of range, or fields that contradict each other.
    """

    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    auto_classes: ClassVar[dict] = {}
    base_model_pp_plan: ClassVar[dict] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    # What serves the values of an axis, most of them position types; a topology adds what only it has.
    parts: ClassVar[dict[str, Any]] = {
        "vectors": dict.fromkeys(LEARNED, LearnedPositions) | dict.fromkeys(SINUSOIDAL, SinusoidalPositions),
        "rotations": {"rotary": make_rotary},  # of queries and keys
        "biases": dict.fromkeys(RELATIVE_BIAS, RelativeBias),  # of the scores
        "distances": {},  # vectors of them, which an attention of another kind reads
        "key_terms": dict.fromkeys(RELATIVE_KEYS, RelativeKeys),  # of the scores, by a layer's queries and keys
        "attention": {},  # where it is not the usual one
        "mlp": {"dense": FeedForward},  # by a layer's entry in `mlp_layer_types`
    }
    if not TYPE_CHECKING:  # fields that every config is asked for, of one topology or of a part that may be left out
        kv_lora_rank = mlp_layer_types = num_experts = num_hidden_groups = token_embedding_size = v_head_dim = None
        linear_bits = mlp_layers = query_growth = rope_layers = rope_parameters = None
        token_dropout = hidden_size_per_layer_input = final_projection_size = token_types_as_tokens = None
        num_nextn_predict_layers, position_offset, padding_position = 0, 0, "index"  # vLLM adds the first to a number
        router_aux_loss_coef = 0.0  # TRL takes a model without a 0 here for one with experts
        relative_bias_per_layer = router_selection_bias = layer_scale = is_varied = scales_in_embedding = False

    vocab_size: int = axis(32000, "a positive integer", "size", "tokens of the vocabulary, V")
    hidden_size: int = axis(512, "a positive integer", "size", "width C of the residual stream")
    num_hidden_layers: int = axis(8, "a positive integer", "size", "layers; in an encoder-decoder, the encoder's")
    type_vocab_size: int = axis(0, "an integer of 0 or more", "embeddings", "token types (segments); 0 means none")
    task_type_vocab_size: int = axis(0, "an integer of 0 or more", "embeddings", "task types; 0 means none")
    embedding_size: int | None = axis(
        None, "a positive integer", "size", "width E of the embeddings, projected to C; None: hidden_size"
    )
    embedding_norm: bool = flag(False, "embeddings", "a norm on the sum of the embeddings")
    embedding_scale: float | None = axis(None, "a positive number", "embeddings", "factor of token vectors; None: 1")
    tie_word_embeddings: bool = flag(False, "embeddings", "the language model head is the embedding matrix")
    lm_head_transform: bool = flag(False, "head", "norm(act(dense(x))) before the language model head")
    classifier_transform: bool = flag(False, "head", "norm(act(dense(x))) before a classifier of rows or tokens")
    head_transform_bias: bool = flag(True, "head", "bias of both transforms' dense layers")
    lm_head_bias: bool | str = axis(
        False, (*FLAG, "fixed"), "head", "bias of the language model head; a fixed one does not learn"
    )
    logit_scale: float | None = axis(1.0, "a positive number", "head", "factor of the states that enter the head")
    final_logit_softcapping: float | None = axis(None, "a positive number", "head", "soft cap of the logits")
    pooler_act: str | None = axis(
        None, tuple(ACT2FN), "head", "activation of an encoder's pooler on the first token; None means no pooler"
    )
    classifier_dropout: float | None = axis(
        None, "a probability from 0 to 1", "training", "dropout before a classifier; None means hidden_dropout"
    )
    initializer_range: float | None = axis(
        0.02, "a positive number", "training", "deviation of fresh weights; None: 1/sqrt(inputs), 1 for embeddings"
    )
    pad_token_learns: bool | None = flag(None, "training", "the embedding of padding learns; None: not in an encoder")
    blocks: dict | None = axis(None, "a dict", "use", "files of blocks from outside, with their SHA-256; filled in")
    other_entries: list | None = axis(None, "a list of names", "use", "entries that other libraries read; filled in")
    use_cache: bool = flag(True, "use", "a decoder returns its keys and values")
    pad_token_id: int | None = axis(None, "a token", "tokens", "padding")
    bos_token_id: int | None = axis(None, "a token", "tokens", "start of a text")
    eos_token_id: int | list | None = axis(None, "a token", "tokens", "end of a text, one token or several")
    __getattribute__ = object.__getattribute__  # the library's looks for second names of fields, at every token

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        lines = (f"        {name} {each.describe()}" for name, each in axes(cls).items())
        cls.__doc__ = "\n".join([f"{cls.__doc__}\n    Args:", *lines, ""])

    def __setattr__(self, name, value):
        """Set a field. When layers are added or removed by hand (PEFT's `layer_replication`), uniform lists follow."""
        lists = _LISTS.get(name, ()) if vars(self).get(name) is not None else ()
        super().__setattr__(name, value)
        for each in lists:
            if len(types := {*(vars(self).get(each) or ())}) == 1:
                setattr(self, each, [*types] * value)

    def __post_init__(self, **kwargs):
        """Each field by itself; the defaults that follow from other fields; all fields together."""
        kwargs = {name: value for name, value in kwargs.items() if _FORMER.get(name, self) != value}
        self.check_fields(kwargs)
        for method in ("fill_defaults", "check"):
            for part in parts_of(type(self), method):
                getattr(part, method)(self)
        self.fill_rope_parameters(kwargs.pop("rope_scaling", None), kwargs.pop("rope_theta", None))
        super().__post_init__(**kwargs)
        self.base_model_tp_plan = self.tensor_parallel_plan(self.add_cross_attention)

    @by_package
    def check_fields(self, kwargs: dict) -> None:
        """Refuse what is wrong by itself: unknown names, and values of another kind."""
        for block in blocks_of(self):
            block.take_fields(self, kwargs)
        self.blocks = {name: digest for block in blocks_of(self) for name, digest in block.digests.items()} or None
        version, number = (kwargs.pop(name, None) for name in STAMP)
        _check_stamp(type(self), version, number, unknown_fields(type(self), kwargs, self.other_entries))
        for name, each in axes(type(self)).items():
            each.check(name, getattr(self, name))
        _check_tokens(self)
        if (dtype := kwargs.get("torch_dtype") if self.dtype is None else self.dtype) is not None:
            check_choice("dtype", dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."), DTYPES)
        if self.problem_type is not None:
            check_choice("problem_type", self.problem_type, PROBLEM_TYPES)

    def fill_defaults(self):
        """Embeddings as wide as the states."""
        self.embedding_size = self.embedding_size or self.hidden_size
        if self.logit_scale is None:  # of older repos; vLLM multiplies by it
            self.logit_scale = 1.0

    def check(self):
        """What holds of the whole model, after what holds of its parts."""
        tied = self.tie_word_embeddings and not self.lm_head_transform
        must_equal = self.is_encoder_decoder or self.output_size != self.hidden_size
        if self.embedding_size != self.hidden_size and (tied or must_equal):
            fix = "make them equal, which an encoder-decoder and token_embedding_size need"
            fix = fix if must_equal else "make them equal, untie the head or set lm_head_transform=True"
            raise ValueError(f"embedding_size ({self.embedding_size}) is not hidden_size ({self.hidden_size}): {fix}.")
        for name in ("is_decoder", "is_encoder_decoder"):
            if getattr(self, name) is not getattr(type(self), name):
                fix = "encoders, decoders and encoder-decoders each have their own config class"
                raise ValueError(f"{name}={getattr(self, name)} contradicts {type(self).__name__}: {fix}.")
        if self.pooler_act is not None and self.is_decoder:
            raise ValueError("pooler_act needs an encoder (a decoder's first token sees no other): leave it out.")

    def convert_rope_params_to_dict(self, **kwargs):
        """Nothing is left to do for the library, after `fill_rope_parameters`."""
        return kwargs

    def to_dict(self):
        """The fields as plain data, with the `auto_map` by which a repo of this config finds its code."""
        settings = super().to_dict()
        others = unknown_fields(type(self), settings, [name for block in blocks_of(self) for name in block.fields])
        # An entry with `--` names code on the Hub, which may change; this code lies next to the weights.
        loaded = {name: code for name, code in (settings.get("auto_map") or {}).items() if "--" not in str(code)}
        classes = {**self.auto_classes, **{name: code for name, code in loaded.items() if BY_WAY_OF not in str(code)}}
        if self.blocks:
            classes = {name: BY_WAY_OF + code.rpartition(".")[2] for name, code in classes.items()}
        return settings | {"auto_map": classes, "other_entries": others or None} | STAMP

    @by_package
    def to_diff_dict(self):
        """What `config.json` holds: all fields that are on; an earlier release may not know the others yet."""
        written, defaults = super().to_diff_dict(), {name: each.default for name, each in axes(type(self)).items()}
        return {name: value for name, value in written.items() if defaults.get(name, True) or value != defaults[name]}

    # An annotation would make a field of each.
    from_dict = classmethod(by_package(PretrainedConfig.from_dict.__func__))  # type: ignore[var-annotated]
    _dict_from_json_file = classmethod(by_package(PretrainedConfig._dict_from_json_file.__func__))  # type: ignore[var-annotated]

    @by_package
    def to_json_file(self, json_file_path, use_diff: bool = True):
        """Write `config.json`, and the blocks from outside that it names next to it."""
        for block in blocks_of(self):
            block.write(self, json_file_path)
        super().to_json_file(json_file_path, use_diff)

    @property
    def head_dropout(self) -> float:
        """The dropout before a classification head."""
        return self.hidden_dropout if self.classifier_dropout is None else self.classifier_dropout

    @property
    def token_size(self) -> int:
        """The width of token vectors."""
        return self.token_embedding_size or self.embedding_size or self.hidden_size

    @property
    def output_size(self) -> int:
        """The width of a stack's states as heads read them."""
        return self.token_embedding_size or self.hidden_size

    def scheme(self, gives: str):
        """What makes the module of the position type if that gives this, one of `parts`; else None."""
        if (own := BLOCKS["position_type"].get(self.position_type)) is None:
            return self.parts[gives].get(self.position_type)
        return own if own.gives == gives else None

    def stack_sizes(self, is_decoder: bool) -> tuple[int, int]:
        """Layers and vocabulary of a stack."""
        return self.num_hidden_layers, self.vocab_size

    def tensor_parallel_plan(self, has_cross_attention: bool) -> dict[str, str]:
        """How the modules of one stack are shared out between processes, by name."""
        plan: dict[str, str] = {}
        for part in parts_of(type(self), "share_out"):
            part.share_out(self, plan, has_cross_attention)
        for block in blocks_of(self):
            block.share_out(plan)
        return plan


def unknown_fields(config_class, names, others=None) -> list[str]:
    """The names, out of some, that the config has no field for; a list of `others` may be there without one."""
    allowed = {field.name for field in fields(config_class)} | INHERITED_ARGUMENTS | generation_field_names()
    allowed |= set(map(str, others)) if isinstance(others, list) else set()
    return [name for name in names if name not in allowed and not name.startswith("_")]


def _check_stamp(config_class, version: str | None, number: int | None, unknown: list[str]) -> None:
    """Refuse what another release wrote and this one does not understand; else unknown fields are slips of the pen."""
    if number is not None and not (is_integer(number) and number <= FORMAT):
        unknown = [f"format {number}", *unknown]
    if unknown and version not in (None, VERSION):
        names = " and ".join(map(repr, unknown))
        what = f"Blockformer {version} wrote this config, and {VERSION} does not know {names}"
        raise ValueError(f"{what}: install blockformer {version} or later.")
    if unknown:
        known = [field.name for field in fields(config_class)]
        hints = [f"{config_class.__name__} has no field '{each}'.{did_you_mean(each, known)}" for each in unknown]
        # Of the stand-in in a repo, left_out.py.
        if missing := sorted({vars(each)["left_out"] for each in config_class.__mro__ if "left_out" in vars(each)}):
            parts = f"This repo leaves out parts that its model does not use ({', '.join(missing)})"
            hints.append(f"{parts}: to use one, install blockformer, import it, and export the model again.")
        raise ValueError(" ".join(hints))


def _check_tokens(config) -> None:
    """Special tokens are tokens of their vocabulary; to a decoder's classifier, -1 says that no token is padding."""
    _, target_size = config.stack_sizes(is_decoder=True)
    sizes = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), max(config.vocab_size, target_size))
    for name, size in {**sizes, "decoder_start_token_id": target_size}.items():
        value = getattr(config, name, None)
        least = -1 if name == "pad_token_id" and "DecoderForSequence" in str(config.architectures) else 0
        for token in value if name == "eos_token_id" and isinstance(value, list | tuple) else [value]:
            if token is not None and not (is_integer(token) and least <= token < size):
                raise ValueError(f"{name} must be a token from 0 to {size - 1}, not {token!r}: set it, or set None.")
