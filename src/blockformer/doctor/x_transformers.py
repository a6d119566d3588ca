"""x-transformers' plain decoder and encoder (`TransformerWrapper`), as Blockformer models.

Norms come first and have no bias, and neither has attention; today's releases add one to the factor of each norm.
Positions are learned or rotary, the network is plain or gated. A checkpoint holds no settings: the user
names the ones that leave no tensor. Layers are numbered twice: attention has even numbers, the network odd ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.conversion.rules.operations import Chain, DeinterleaveRotary, Identity, Shape, Split
from blockformer.conversion.rules.table import Rule, module_rules
from blockformer.files.errors import ConversionError, shown
from blockformer.files.safetensors_io import torch_name
from blockformer.model.rotary import rotary_size

from .own_code import CONFIG, Model, OwnCode, Settings, Tensors, refuse, said

EMBEDDINGS, POSITIONS, HEAD = "token_emb.emb.weight", "pos_emb.emb.weight", "to_logits.weight"
LAYERS, FREQUENCIES = "attn_layers.layers.", "attn_layers.rotary_pos_emb.inv_freq"
CLASSES = {
    "blockformer_decoder": ("BlockformerDecoderForCausalLM", "BlockformerDecoderModel"),
    "blockformer_encoder": ("BlockformerEncoderForMaskedLM", "BlockformerEncoderModel"),
}
"""The class with a head for the logits, and without one (`return_only_embed`)."""
ASKED = {
    "model_type": "blockformer_decoder (causal) or blockformer_encoder",
    "num_attention_heads": "heads",
    "hidden_act": "gelu, relu2 (relu_squared) or silu (swish)",
    "norm_weight": "zero_centered for norm_add_unit_offset, today's default; plain without it",
}
ROTATION = {
    "rope_parameters": '\'{"rope_type": "default", "rope_theta": 10000.0}\'',
    "max_position_embeddings": "max_seq_len",
}
TIED = {
    "logit_scale": "tie_embedding_scale: one over the root of the width is today's default; 1.0 before it; or for a "
    "model without a head, return_only_embed, architectures"
}
GATED, PLAIN, OUTER = ".1.ff.0.proj", ".1.ff.0.0", ".1.ff.2"
NORM_EPS = {"gamma": 1e-5, "g": 1e-24}
"""Layer norms add PyTorch's epsilon; RMS norms divide by the length itself, which this one does not change."""


@dataclass(frozen=True)
class Scaled:
    """A table times `factor`, as the code multiplies it in each step. What goes out is compared."""

    factor: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor * self.factor for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor / self.factor for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class ByGroup:
    """Heads of queries along `dim`: the code gives head h the key head h modulo `groups`, models here h // repeats."""

    dim: int
    groups: int
    repeats: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._exchanged(tensor, (self.repeats, self.groups)) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._exchanged(tensor, (self.groups, self.repeats)) for tensor in tensors]

    def _exchanged(self, tensor: Tensor, heads: tuple[int, int]) -> Tensor:
        apart = tensor.unflatten(self.dim, (*heads, -1))
        return apart.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2).contiguous()

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    inverse_shapes = forward_shapes


def _is_bare(architectures: Any) -> bool:
    """Whether these name a model without a head."""
    return isinstance(architectures, list) and architectures[:1] in [[bare] for _, bare in CLASSES.values()]


def _entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
    has_rotation, has_table = FREQUENCIES in tensors, POSITIONS in tensors
    is_tied = HEAD not in tensors and not _is_bare(settings.get("architectures"))
    asked = ASKED | (ROTATION if has_rotation else {}) | (TIED if is_tied else {})
    if absent := [name for name in asked if name not in settings]:
        options = "; ".join(f"--set {name}=... ({asked[name]})" for name in absent)
        raise ConversionError(f"x-transformers saves no settings, and no tensor shows these; tell doctor: {options}")
    kind, heads = settings["model_type"], settings["num_attention_heads"]
    lines = [] if kind in CLASSES else [f"model_type is {said(kind)}, not one of {', '.join(CLASSES)}"]
    if has_rotation and has_table:
        lines.append("its positions are learned and rotary at once")
    if not has_rotation and not has_table:
        lines.append("it has neither a table of positions nor rotary ones")
    if type(heads) is not int or heads < 1:
        lines.append(f"num_attention_heads is {said(heads)}, not a positive integer")
    norm = next((each for each in NORM_EPS if f"attn_layers.final_norm.{each}" in tensors), None)
    if norm is None:
        lines.append("it has no final norm with a factor, as pre-norm layers have")
    first = f"{LAYERS}1{GATED}.weight" if f"{LAYERS}1{GATED}.weight" in tensors else f"{LAYERS}1{PLAIN}.weight"
    needed = [first, f"{LAYERS}0.1.to_k.weight"]
    lines += [f"{shown(name)} is missing" for name in needed if name not in tensors]
    refuse("x-transformers", lines)
    size = tensors[f"{LAYERS}0.1.to_q.weight"].shape[0] // heads
    is_gated = first.endswith(f"{GATED}.weight")
    rope = dict(settings.get("rope_parameters") or {})
    if has_rotation:
        share = 2 * tensors[FREQUENCIES].shape[0] / max(size, 1)
        rope |= {} if share == 1 else {"partial_rotary_factor": share}
    return {
        "architectures": [CLASSES[kind][0]],
        "vocab_size": tensors[EMBEDDINGS].shape[0],
        "hidden_size": tensors[EMBEDDINGS].shape[1],
        "intermediate_size": tensors[first].shape[0] // (2 if is_gated else 1),
        "num_hidden_layers": len({name.split(".")[2] for name in tensors if name.startswith(LAYERS)}) // 2,
        "num_key_value_heads": tensors[f"{LAYERS}0.1.to_k.weight"].shape[0] // max(size, 1),
        "head_dim": size,
        "norm_type": "layer_norm" if norm == "gamma" else "rms_norm",
        "norm_eps": NORM_EPS[norm or "gamma"],
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "position_type": "rotary" if has_rotation else "learned",
        "gated_mlp": is_gated,
        "mlp_bias": f"{first.removesuffix('weight')}bias" in tensors,
        "tie_word_embeddings": is_tied,
        "dtype": torch_name(tensors[EMBEDDINGS].dtype),
        **{name: value for name, value in settings.items() if name not in ROTATION},
        **({"max_position_embeddings": tensors[POSITIONS].shape[0]} if has_table else {}),
        **({**{name: settings[name] for name in ROTATION}, "rope_parameters": rope} if has_rotation else {}),
    }


def _rules(model: Model, names: Collection[str]) -> Sequence[Rule]:
    config = model.config
    norm = "gamma" if config.norm_type == "layer_norm" else "g"
    is_bare = _is_bare(config.architectures)
    if not is_bare and (config.architectures or CLASSES[config.model_type])[0] not in CLASSES[config.model_type]:
        raise ConversionError(
            f"x-transformers has no place for the head of a {config.architectures[0]}; it has that of "
            f"{CLASSES[config.model_type][0]}, or none"
        )
    root = "" if is_bare else "model."
    rules = [
        Rule(EMBEDDINGS, f"{root}embed_tokens.weight"),
        Rule(f"attn_layers.final_norm.{norm}", f"{root}norm.weight"),
        *([] if config.tie_word_embeddings or is_bare else [Rule(HEAD, "lm_head.weight")]),
    ]
    turn: Any = Identity()
    if config.position_type == "rotary":
        turn = DeinterleaveRotary(config.head_dim, rotary_size(config.rope_parameters, config.head_dim))
    else:
        rules.append(Rule(POSITIONS, f"{root}embed_positions.weight", Scaled(config.hidden_size**-0.5)))
    groups = config.num_key_value_heads
    heads = (groups, config.num_attention_heads // groups)
    for layer in range(config.num_hidden_layers):
        attention, network, ours = f"{LAYERS}{2 * layer}", f"{LAYERS}{2 * layer + 1}", f"{root}layers.{layer}."
        rules += [
            Rule(f"{attention}.0.0.{norm}", f"{ours}self_attn_pre_norm.weight"),
            Rule(f"{network}.0.0.{norm}", f"{ours}mlp_pre_norm.weight"),
            Rule(f"{attention}.1.to_q.weight", f"{ours}self_attn.q_proj.weight", Chain(ByGroup(0, *heads), turn)),
            Rule(f"{attention}.1.to_k.weight", f"{ours}self_attn.k_proj.weight", turn),
            Rule(f"{attention}.1.to_v.weight", f"{ours}self_attn.v_proj.weight"),
            Rule(f"{attention}.1.to_out.weight", f"{ours}self_attn.o_proj.weight", ByGroup(1, *heads)),
        ]
        rules += module_rules({f"{network}{OUTER}": f"{ours}mlp.down_proj"})
        if config.gated_mlp:
            both = (f"{ours}mlp.up_proj", f"{ours}mlp.gate_proj")
            rules += module_rules({f"{network}{GATED}": both}, Split(0, (config.intermediate_size,) * 2))
        else:
            rules += module_rules({f"{network}{PLAIN}": f"{ours}mlp.up_proj"})
    return rules


def _back(model: Model) -> dict[str, Any]:
    """What the user would have to say of the model's checkpoint."""
    config = model.config
    asked = [*ASKED, *(ROTATION if config.position_type == "rotary" else ())]
    if _is_bare(config.architectures):
        asked.append("architectures")
    elif config.tie_word_embeddings:
        asked += TIED
    return {name: getattr(config, name) for name in asked}


def _adds(model: Model) -> dict[str, Tensor]:
    """The frequencies of the rotation, which say that there is one, and of how many channels of each head."""
    config = model.config
    if config.position_type != "rotary":
        return {}
    size = rotary_size(config.rope_parameters, config.head_dim)
    return {FREQUENCIES: float(config.rope_parameters["rope_theta"]) ** -(torch.arange(0, size, 2).float() / size)}


X_TRANSFORMERS = OwnCode(
    name="x-transformers",
    shows=(EMBEDDINGS, f"{LAYERS}0.1.to_q.weight", f"{LAYERS}0.1.to_out.weight"),
    key=CONFIG,
    entries=_entries,
    rules=_rules,
    ignored=(FREQUENCIES,),
    fills=((".mlp.down_proj.bias", 0.0),),
    families=(None,),
    back=_back,
    adds=_adds,
    file="model.pt",
)
