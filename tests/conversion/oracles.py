"""Small official models with random, peaky weights, and folders compared to the bit."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.conversion import convert
from blockformer.conversion.families.registry import FAMILIES

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What makes each family different from the others.
SPECIAL = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def in_official_names(family, sizes):
    """Sizes by the names that a family's record gives them; what the record computes is not among them."""
    return {theirs: sizes[ours[0]] for theirs, ours in FAMILIES[family].settings.meanings.items() if ours[0] in sizes}


BERT_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GPT2_OURS = {**BERT_SIZES, "initializer_range": 0.35, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2_SIZES = {**in_official_names("gpt2", GPT2_OURS), "n_inner": 80}
ROBERTA_SIZES = {**BERT_SIZES, "type_vocab_size": 1, "max_position_embeddings": 66, "layer_norm_eps": 1e-5}
DISTILBERT_SIZES = {**in_official_names("distilbert", BERT_SIZES), "max_position_embeddings": 64}
RELATIVE = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
T5_SIZES = {**in_official_names("t5", {**BERT_SIZES, **RELATIVE, "head_dim": 16}), "decoder_start_token_id": 0}
BOTH_SIDES = {"num_hidden_layers": 1, "decoder_layers": 1, "decoder_intermediate_size": 80, "initializer_range": 0.2}
BART_SIZES = in_official_names("bart", {**BERT_SIZES, **BOTH_SIDES})
BART_TOKENS = {
    "marian": {"pad_token_id": 60, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 60},
    "bart": {"pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 2},
    "mbart": {"pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 50},
}
BART_SPECIAL = {
    "marian": {"scale_embedding": True, "activation_function": "swish", "init_std": 0.15},
    "bart": {},
    "mbart": {"scale_embedding": True},
}
LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5}


class Small(NamedTuple):
    """How the small models of a family are made.

    Attributes:
        settings: of the official config.
        spread: the deviation of what is added to biases and norms.
        labels: how many there are, by the end of the class's name.
    """

    settings: dict[str, Any]
    spread: float
    labels: dict[str, int] = LABELS


SMALL = {family: Small({**SIZES, **special}, spread=0.2) for family, special in SPECIAL.items()}
SMALL["gpt2"] = Small(GPT2_SIZES, spread=0.3)
SMALL["bert"] = Small(BERT_SIZES, spread=0.3)
SMALL |= {family: Small(ROBERTA_SIZES, spread=0.3) for family in ("roberta", "xlm-roberta")}
SMALL["distilbert"] = Small(DISTILBERT_SIZES, spread=0.3)
SMALL |= {family: Small(T5_SIZES, 0.3, dict.fromkeys(LABELS, 5)) for family in ("t5", "mt5", "umt5")}
SMALL |= {
    family: Small({**BART_SIZES, **BART_TOKENS[family], **special}, 0.1, dict.fromkeys(LABELS, 5))
    for family, special in BART_SPECIAL.items()
}


def official_class(family, name=None):
    """A family's class of transformers: "Model" and "BartModel" are the same; without a name, the usual one."""
    chosen = FAMILIES[family]
    if name is None:
        return getattr(transformers, chosen.heads[0].official)
    prefix = chosen.settings.official_class.__name__.removesuffix("Config")
    return getattr(transformers, name if name.startswith(prefix) else prefix + name)


def labels_of(name, labels=LABELS):
    """The setting of how many labels a class has, if it has any."""
    return next(({"num_labels": count} for ending, count in labels.items() if name.endswith(ending)), {})


@torch.no_grad()
def randomize_biases_and_norms(model, spread, redrawn=None):
    """Add noise to what starts as all zeros or all ones, and draw anew matrices of zeros or of the name `redrawn`."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name or "statics" in name:
            parameter.add_(torch.randn_like(parameter) * spread)
        elif (redrawn is not None and redrawn in name) or not parameter.any():
            parameter.normal_()


def official_model(family, name=None, *, seed=0, dtype=torch.float32, **settings):
    """A small model of transformers, peaky, its biases and norms random too.

    Args:
        family: one of `SMALL`, or any whose config takes `SIZES`.
        name: of its class, with or without the prefix that all of the family have.
        seed: of the weights.
        dtype: of the weights.
        settings: of the config, over the family's own.
    """
    torch.manual_seed(seed)
    small, cls = SMALL.get(family, Small(SIZES, spread=0.2)), official_class(family, name)
    settings = {**small.settings, **labels_of(cls.__name__, small.labels), **settings}
    model = cls(FAMILIES[family].settings.official_class(**settings)).eval()
    randomize_biases_and_norms(model, small.spread, redrawn="relative_attention_bias")
    if hasattr(model, "final_logits_bias"):  # of BART, a buffer
        model.final_logits_bias.normal_(std=0.3)
    return model.to(dtype)


def official_folder(folder, family="qwen3", name=None, *, shards=False, tokenizer=None, **settings):
    """The same, saved; with a tokenizer if one is given."""
    model = official_model(family, name, **settings)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model


def in_our_names(tensors):
    """Tensors of a decoder after Llama by the names that ours have: the norms of a layer have others."""
    names = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
    made = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        made[name] = tensor
    return made


def stored(folder):
    """name -> (dtype, shape, bytes) of every tensor in a folder's safetensors files, read by hand."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            assert name not in tensors
            tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def entries_of(folder, name="config.json"):
    return json.loads((Path(folder) / name).read_text())


def edit_config(folder, **changes):
    """Change a folder's config.json; a value of `...` takes the entry away."""
    entries = {**entries_of(folder), **changes}
    kept = {name: value for name, value in entries.items() if value is not ...}
    (Path(folder) / "config.json").write_text(json.dumps(kept))


def edit_tensors(folder, change=dict, **changes):
    """Rewrite a folder's tensors: `change` takes and gives a dict; `changes` are put in, or taken away (None)."""
    path = Path(folder) / "model.safetensors"
    tensors = {**change(load_file(path)), **changes}
    kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def fingerprint(folder):
    """Every file below a folder with its content and modification time, to show that nothing was touched."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }


def assert_verified(report):
    """The conversion has compared both models, in float32 or float64 too, all outputs were finite, and they agree."""
    parity = report.parity
    assert parity.passed, parity
    assert parity.measured
    assert all(one.finite and one.passed for one in parity.measured), parity
    assert any(one.dtype in ("float32", "float64") for one in parity.measured), parity


def there_and_back(folder, *, verify=True, verify_back=False):
    """Convert `src` to `dst`, which is verified, and on to `back`: `src` bit for bit, which stays as it was.

    Args:
        folder: has `src`.
        verify: what `convert` takes.
        verify_back: the same for the way back. The bits are those of a source that was compared, so few tests ask.

    Returns:
        The report of the way in.
    """
    src, dst, back = (folder / name for name in ("src", "dst", "back"))
    before = fingerprint(src)
    report = convert(src, dst, verify=verify)
    assert_verified(report)
    returned = convert(dst, back, to_official=True, verify=verify_back)
    if verify_back not in (False, "none"):
        assert_verified(returned)
    assert fingerprint(src) == before
    assert stored(back) == stored(src)
    assert entries_of(back) == entries_of(src)
    return report


def name_of(value):
    """The official class of a head, for the name of a test."""
    return getattr(value, "official", str(value))


def assert_same_state(one, other):
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(state[name], tensor), name


def assert_loads_as(folder, model):
    """The model's class finds its weights in the folder, all and no other, each the same to the bit."""
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert_same_state(again, model)


def under_another_head(folder, ours, official):
    """The checkpoint `src` with a head of ours for four labels, and the official model that it goes out as."""
    convert(folder / "src", folder / "repo", verify=False)
    tuned = ours.from_pretrained(folder / "repo", num_labels=4)
    blockformer.export_model(tuned, folder / "tuned")
    assert_verified(convert(folder / "tuned", folder / "out", to_official=True))
    theirs, info = official.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(info.values())
    assert theirs.config.num_labels == 4
    return tuned, theirs
