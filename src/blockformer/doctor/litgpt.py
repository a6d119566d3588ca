"""litgpt's `lit_model.pth` with `model_config.yaml`: Llama, Mistral, Qwen2, Qwen3, GPT-NeoX (Pythia) and Phi.

Queries, keys and values are one matrix, one after the other. Earlier releases called it `attn.attn` and kept
the rows of each key/value head together.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockformer.conversion.rules.operations import Chain, Reversed, Reversible, Split
from blockformer.conversion.rules.table import Rule, module_rules
from blockformer.files.safetensors_io import torch_name

from .own_code import Model, OwnCode, Settings, Tensors, refuse, said

EMBEDDINGS, HEAD, LAYER = "transformer.wte", "lm_head", "transformer.h.{layer}."
QKV, EARLIER_QKV = "attn.qkv", "attn.attn"
APART = tuple(f"self_attn.{name}_proj" for name in "qkv")
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "intermediate_size": "intermediate_size",
    "block_size": "max_position_embeddings",
}
ALWAYS = {
    "n_expert": 0,
    "latent_attention": None,
    "attention_scores_scalar": None,
    "attention_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_condense_ratio": 1,
    "rope_interleave": False,
    "rope_local_base_freq": None,
    "post_attention_norm": False,
    "post_mlp_norm": False,
    "scale_embeddings": False,
    "norm_1": True,
    "norm_2": True,
    "norm_qk_type": "default",
}
"""Settings that all kinds share, with the values that litgpt takes where its file does not name them."""
DEFAULTS = {
    **ALWAYS,
    "bias": True,
    "attn_bias": False,
    "norm_qk": False,
    "shared_attention_norm": False,
    "lm_head_bias": False,
    "parallel_residual": True,
    "rotary_percentage": 0.25,
    "norm_class_name": "LayerNorm",
    "norm_eps": 1e-5,
    "mlp_class_name": "GptNeoxMLP",
    "gelu_approximate": "none",
    "rope_base": 10000,
    "rope_adjustments": None,
    "sliding_window_size": None,
    "sliding_window_indices": None,
}
GATED = {
    "mlp_class_name": "LLaMAMLP",
    "norm_class_name": "RMSNorm",
    "parallel_residual": False,
    "shared_attention_norm": False,
    "bias": False,
    "attn_bias": False,
    "norm_qk": False,
    "lm_head_bias": False,
    "rotary_percentage": 1.0,
}
PLAIN = {"mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm", "bias": True, "norm_qk": False}
SCALED = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
"""Llama 3.1's change of the rotation: litgpt's name -> the entry."""
ACTIVATIONS = {"none": "gelu", "tanh": "gelu_new"}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        architecture: the official class.
        has: settings by which it is known.
        layer: module of a layer -> the official one, without queries, keys and values.
        outer: the same outside of the layers.
        root: prefix of the official stack.
        qkv: the official module of all three; "" where they are three.
        eps: the entry for the epsilon of norms.
    """

    architecture: str
    has: Mapping[str, Any]
    layer: Mapping[str, str]
    outer: Mapping[str, str]
    root: str = "model."
    qkv: str = ""
    eps: str = "rms_norm_eps"


LLAMA_LAYER = {
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
}
LLAMA_OUTER = {EMBEDDINGS: "model.embed_tokens", "transformer.ln_f": "model.norm", HEAD: "lm_head"}
Q_AND_K_NORM = {"attn.norm_q": "self_attn.q_norm", "attn.norm_k": "self_attn.k_norm"}
KINDS = {
    "llama": Kind("LlamaForCausalLM", GATED, LLAMA_LAYER, LLAMA_OUTER),
    "mistral": Kind("MistralForCausalLM", GATED, LLAMA_LAYER, LLAMA_OUTER),
    "qwen2": Kind("Qwen2ForCausalLM", {**GATED, "attn_bias": True}, LLAMA_LAYER, LLAMA_OUTER),
    "qwen3": Kind("Qwen3ForCausalLM", {**GATED, "norm_qk": True}, {**LLAMA_LAYER, **Q_AND_K_NORM}, LLAMA_OUTER),
    "gpt_neox": Kind(
        "GPTNeoXForCausalLM",
        {**PLAIN, "shared_attention_norm": False, "lm_head_bias": False},
        {
            "attn.proj": "attention.dense",
            "mlp.fc": "mlp.dense_h_to_4h",
            "mlp.proj": "mlp.dense_4h_to_h",
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
        },
        {EMBEDDINGS: "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", HEAD: "embed_out"},
        root="gpt_neox.",
        qkv="attention.query_key_value",
        eps="layer_norm_eps",
    ),
    "phi": Kind(
        "PhiForCausalLM",
        {**PLAIN, "shared_attention_norm": True, "lm_head_bias": True, "parallel_residual": True},
        {
            "attn.proj": "self_attn.dense",
            "mlp.fc": "mlp.fc1",
            "mlp.proj": "mlp.fc2",
            "norm_1": "input_layernorm",
        },
        {EMBEDDINGS: "model.embed_tokens", "transformer.ln_f": "model.final_layernorm", HEAD: "lm_head"},
        eps="layer_norm_eps",
    ),
}


def _kind_of(settings: Settings) -> str:
    """The name of the kind that has these settings; what no kind has is refused."""
    wrong = {name: _differing(settings, kind.has) for name, kind in KINDS.items()}
    name = min(wrong, key=lambda each: len(wrong[each]))
    lines = [*wrong[name], *_differing(settings, ALWAYS)]
    unit_offset = next((each for each in ("Gemma", "OLMo") if each in str(settings.get("name"))), None)
    if unit_offset is not None:
        lines.append(f"its name has {unit_offset!r}, by which litgpt takes other norms")
    scaling = settings["rope_adjustments"]
    if scaling is not None and not (isinstance(scaling, dict) and {*scaling} == {*SCALED}):
        lines.append(f"rope_adjustments is {said(scaling)}, not Llama 3.1's")
    window = settings["sliding_window_size"]
    if window is not None:
        marks = settings["sliding_window_indices"]
        is_everywhere = marks is None or (isinstance(marks, list) and all(marks[: settings["n_layer"]]))
        if name == "llama" and is_everywhere:
            name = "mistral"
        else:
            lines.append(f"sliding_window_size is {said(window)} in {'all' if is_everywhere else 'some'} layers")
    refuse("litgpt", lines)
    return name


def _differing(settings: Settings, wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {said(settings[name])}, not {said(value)}"
        for name, value in wanted.items()
        if settings[name] != value
    ]


def _entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
    settings = {**DEFAULTS, **settings}
    name = _kind_of(settings)
    kind, heads = KINDS[name], settings["n_head"]
    size = settings.get("head_size") or settings["n_embd"] // heads
    rope = {"rope_type": "default", "rope_theta": float(settings["rope_base"])}
    if settings["rope_adjustments"] is not None:
        rope |= {"rope_type": "llama3", **{SCALED[each]: value for each, value in settings["rope_adjustments"].items()}}
    entries = {
        "model_type": name,
        "architectures": [kind.architecture],
        **{theirs: settings[own] for own, theirs in SIZES.items() if own in settings},
        "vocab_size": tensors[f"{EMBEDDINGS}.weight"].shape[0],
        kind.eps: settings["norm_eps"],
        "rope_parameters": rope,
        "dtype": torch_name(tensors[f"{EMBEDDINGS}.weight"].dtype),
    }
    if kind.has["mlp_class_name"] == PLAIN["mlp_class_name"]:
        entries.setdefault("intermediate_size", 4 * settings["n_embd"])
        entries["hidden_act"] = ACTIVATIONS[settings["gelu_approximate"]]
        rope["partial_rotary_factor"] = settings["rotary_percentage"]
        groups = {} if kind.qkv else {"num_key_value_heads": settings.get("n_query_groups") or heads}
        parallel = {"use_parallel_residual": settings["parallel_residual"]} if kind.qkv else {}
        return entries | groups | parallel
    entries |= {"num_key_value_heads": settings.get("n_query_groups") or heads, "hidden_act": "silu"}
    entries |= {"head_dim": size} if name not in ("qwen2",) else {}
    return entries | ({"sliding_window": settings["sliding_window_size"]} if name == "mistral" else {})


def _rules(model: Model, names: Collection[str]) -> Sequence[Rule]:
    kind, config = KINDS[model.family or ""], model.config
    rows = tuple(count * config.head_dim for count in _heads(model))
    layer = f"{kind.root}layers.{{layer}}."
    is_earlier = any(f".{EARLIER_QKV}." in name for name in names)
    apart: Reversible = Split(0, rows, config.num_key_value_heads if is_earlier else 1)
    source = f"{LAYER}{EARLIER_QKV if is_earlier else QKV}"
    if kind.qkv:
        joined = Chain(apart, Reversed(Split(0, rows, config.num_attention_heads)))
        rules = module_rules({source: f"{layer}{kind.qkv}"}, joined)
    else:
        rules = module_rules({source: tuple(f"{layer}{part}" for part in APART)}, apart)
    same = {f"{LAYER}{own}": f"{layer}{theirs}" for own, theirs in kind.layer.items()}
    return rules + module_rules({**same, **kind.outer})


def _heads(model: Model) -> tuple[int, int, int]:
    """Heads of queries, keys and values."""
    groups = model.config.num_key_value_heads
    return model.config.num_attention_heads, groups, groups


def _back(model: Model) -> dict[str, Any]:
    kind, config = KINDS[model.family or ""], model.config
    rope = config.rope_parameters
    settings = {
        **DEFAULTS,
        "name": "",
        "hf_config": {},
        **{own: getattr(config, theirs) for own, theirs in SIZES.items()},
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "head_size": config.head_dim,
        "n_query_groups": config.num_key_value_heads,
        "norm_eps": config.norm_eps,
        "rope_base": _whole(rope["rope_theta"]),
        **kind.has,
    }
    if kind.has["mlp_class_name"] == PLAIN["mlp_class_name"]:
        approximations = {activation: name for name, activation in ACTIVATIONS.items()}
        settings["gelu_approximate"] = approximations.get(config.hidden_act, "none")
        settings["rotary_percentage"] = rope.get("partial_rotary_factor", 1.0)
        settings["parallel_residual"] = config.residual != "sequential"
    if rope.get("rope_type") == "llama3":
        settings["rope_adjustments"] = {own: _whole(rope[theirs]) for own, theirs in SCALED.items()}
    if model.family == "mistral" and config.sliding_window is not None:
        settings["sliding_window_size"] = config.sliding_window
        settings["sliding_window_indices"] = [1] * config.num_hidden_layers
    return settings


def _whole(number: float) -> float:
    """The number as an integer where it is one."""
    return int(number) if float(number).is_integer() else number


LITGPT = OwnCode(
    name="litgpt",
    shows=(
        f"{EMBEDDINGS}.weight",
        f"{HEAD}.weight",
        "transformer.h.0.attn.proj.weight",
        "transformer.h.0.norm_1.weight",
    ),
    key="model_config.yaml",
    needs=("n_layer", "n_head", "n_embd", "block_size"),
    entries=_entries,
    rules=_rules,
    families=tuple(KINDS),
    back=_back,
    file="lit_model.pth",
)
