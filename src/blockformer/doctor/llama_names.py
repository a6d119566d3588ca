"""torchtune's and torchtitan's checkpoints of Llama, Mistral, Qwen2 and Qwen3, which keep no settings.

What the shapes do not say is in the `config.json` of the official model, which torchtune copies next to its weights,
or is said by the user. Both write Llama's queries and keys with the rotated pairs of each head side by side.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from blockformer.conversion.rules.operations import Chain, DeinterleaveRotary, Each, Identity, LeadingAxis, Split
from blockformer.conversion.rules.table import Rule
from blockformer.files.errors import ConversionError
from blockformer.files.safetensors_io import torch_name

from .own_code import CONFIG, Model, OwnCode, Settings, Tensors, refuse, said

EMBEDDINGS, LAYER, OURS = "tok_embeddings.weight", "layers.{layer}.", "model.layers.{layer}."
PAIRED = ("llama", "mistral")
"""Families whose rotated pairs lie side by side in these layouts."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ASKED = {
    "num_attention_heads": "32",
    "rope_parameters": '\'{"rope_type": "default", "rope_theta": 500000.0}\'',
    "rms_norm_eps": "1e-5",
    "max_position_embeddings": "8192",
}
"""Entries that no shape shows -> an example of each."""
Names = Mapping[str, str]
TUNE = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
TITAN = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
INNER = "attention.qkv_linear.w"
"""How later releases of torchtitan call `attention.w` of queries, keys and values in Qwen3."""
JOINED, BOTH = "attention.wqkv.weight", "feed_forward.w13.weight"
"""Tensors that its latest releases have joined."""
QKV = ("q_proj", "k_proj", "v_proj")
NORM_PARTS = ("norm", "layernorm")


def _entries_with(modules: Names, norm: str, name: str) -> Callable[[Settings, Tensors], dict[str, Any]]:
    """A function that makes `config.json` from the shapes and from what the user or a file next to them says."""
    theirs = {official: own for own, official in modules.items()}

    def entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
        names = _todays(tensors)

        def rows(official: str) -> int:
            header = tensors.get(names.get(f"layers.0.{theirs[official]}.weight", ""))
            if header is None:
                raise ConversionError(f"'layers.0.{theirs[official]}.weight' is missing; save the whole model again")
            return header.shape[0]

        joined, both = (tensors.get(names.get(f"layers.0.{each}", "")) for each in (JOINED, BOTH))
        has_norms = f"layers.0.{theirs['self_attn.q_norm']}.{norm}" in names
        has_biases = f"layers.0.{theirs['self_attn.q_proj']}.bias" in names
        family = "qwen3" if has_norms else "qwen2" if has_biases else "llama"
        kind = settings.get("model_type", family)
        if kind != family and (family, kind) != ("llama", "mistral"):
            refuse(name, [f"config.json has model_type {said(kind)}, but the tensors belong to {family}"])
        _ask(settings, name, [] if joined is None else ["num_key_value_heads"])
        heads, groups = settings["num_attention_heads"], settings.get("num_key_value_heads")
        if joined is not None:
            size = joined.shape[0] // (heads + 2 * groups)
        else:
            size = rows("self_attn.q_proj") // heads
            groups = rows("self_attn.k_proj") // max(size, 1)
        numbers = {int(each.split(".")[1]) for each in names if each.startswith("layers.")}
        return {
            "model_type": kind,
            "architectures": [ARCHITECTURES[kind]],
            "vocab_size": tensors[EMBEDDINGS].shape[0],
            "hidden_size": tensors[EMBEDDINGS].shape[1],
            "intermediate_size": rows("mlp.gate_proj") if both is None else both.shape[1],
            "num_hidden_layers": len(numbers),
            "num_key_value_heads": groups,
            **({} if kind == "qwen2" else {"head_dim": size}),
            "hidden_act": "silu",
            "tie_word_embeddings": not {"output.weight", "lm_head.weight"} & {*tensors},
            "dtype": torch_name(tensors[EMBEDDINGS].dtype),
            **settings,
        }

    return entries


def _ask(settings: Settings, name: str, more: Collection[str] = ()) -> None:
    """Refuse settings that lack what no shape shows; an official `config.json` has it, or means the class's default."""
    wanted = [*([*ASKED][:1] if settings.get("architectures") else ASKED), *more]
    absent = [each for each in wanted if each not in settings]
    if absent:
        options = " ".join(f"--set {each}={ASKED.get(each, '8')}" for each in absent)
        raise ConversionError(
            f"{name} saves no settings, and shapes do not show {', '.join(absent)}: put the base model's config.json "
            f"there, name the base model with --against, or set the values, such as {options}"
        )
    for each in ("num_attention_heads", *more):
        if type(settings[each]) is not int or settings[each] < 1:
            raise ConversionError(f"{each} must be a positive integer, not {said(settings[each])}")


def _todays(names: Collection[str]) -> dict[str, str]:
    """Today's name -> the name in the file."""
    return {name.replace(INNER, "attention.w"): name for name in names}


def rules_with(modules: Names, norm: str) -> Callable[[Model, Collection[str]], Sequence[Rule]]:
    """What makes the rules; `norm` is how the weight of a norm is called."""

    def rules(model: Model, names: Collection[str]) -> Sequence[Rule]:
        size = model.config.head_dim
        is_inner = any(INNER in name for name in names)
        head = "lm_head.weight" if "lm_head.weight" in names else "output.weight"
        found = [
            Rule(EMBEDDINGS, "model.embed_tokens.weight"),
            Rule(f"norm.{norm}", "model.norm.weight"),
            Rule(head, "lm_head.weight"),
        ]
        todays = _todays(names)
        joined, both = (any(name.endswith(f".{each}") for name in todays) for each in (JOINED, BOTH))
        found += [*(_joined_rules(model) if joined else ()), *(_both_rules() if both else ())]
        for own, official in modules.items():
            if (joined and official.endswith(QKV)) or (both and official.endswith(("gate_proj", "up_proj"))):
                continue
            is_turned = model.family in PAIRED and official in ("self_attn.q_proj", "self_attn.k_proj")
            op = DeinterleaveRotary(size, size) if is_turned else Identity()
            kind = norm if official.endswith(NORM_PARTS) else "weight"
            if is_inner and own in ("attention.wq", "attention.wk", "attention.wv"):
                own = own.replace("attention.w", INNER)
            found.append(Rule(f"{LAYER}{own}.{kind}", f"{OURS}{official}.weight", op))
            if model.family == "qwen2" and official.endswith(QKV):
                found.append(Rule(f"{LAYER}{own}.bias", f"{OURS}{official}.bias"))
        return found

    return rules


def _joined_rules(model: Model) -> list[Rule]:
    """Queries, keys and values as one matrix: of each key head its queries, its key, its value."""
    config = model.config
    size, groups = config.head_dim, config.num_key_value_heads
    split = Split(0, (config.num_attention_heads * size, groups * size, groups * size), groups)
    turn = DeinterleaveRotary(size, size) if model.family in PAIRED else Identity()
    parts = tuple(f"{OURS}self_attn.{part}.weight" for part in QKV)
    return [Rule(f"{LAYER}{INNER}qkv.weight", parts, Chain(split, Each((turn, turn, Identity()))))]


def _both_rules() -> list[Rule]:
    """Gate and up as one tensor, [2, F, C]."""
    parts = tuple(f"{OURS}mlp.{part}_proj.weight" for part in ("gate", "up"))
    return [Rule(f"{LAYER}{BOTH}", parts, Chain(Split(0, (1, 1)), LeadingAxis()))]


def _nothing(model: Model) -> dict[str, Any]:
    """The settings are in `config.json`."""
    return {}


TORCHTUNE = OwnCode(
    name="torchtune",
    shows=(EMBEDDINGS, "layers.0.attn.output_proj.weight", "layers.0.mlp.w1.weight", "layers.0.sa_norm.scale"),
    key=CONFIG,
    entries=_entries_with(TUNE, "scale", "torchtune"),
    rules=rules_with(TUNE, "scale"),
    families=("llama", "mistral", "qwen2", "qwen3"),
    back=_nothing,
    file="torchtune_model.pt",
)
TORCHTITAN = OwnCode(
    name="torchtitan",
    shows=(EMBEDDINGS, "layers.0.attention.wo.weight", "layers.0.ffn_norm.weight"),
    key=CONFIG,
    entries=_entries_with(TITAN, "weight", "torchtitan"),
    rules=rules_with(TITAN, "weight"),
    families=("llama", "qwen3"),
    back=_nothing,
    file="checkpoint",
    ignored=("freqs_cis", "rope_cache", "rope.cache"),
)
