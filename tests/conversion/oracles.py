"""Small official checkpoints with random, peaky weights, and folders compared to the bit."""

import hashlib
import json
from pathlib import Path

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


def official_model(family, seed=0, dtype=torch.float32, **settings):
    """A model of transformers; its biases are random too."""
    torch.manual_seed(seed)
    chosen = FAMILIES[family]
    config = chosen.official_config_class(**{**SIZES, **SPECIAL.get(family, {}), **settings})
    model = getattr(transformers, chosen.model_class_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def official_folder(folder, family="qwen3", dtype=torch.float32, shards=False, tokenizer=None, **settings):
    """The same, saved; with a tokenizer if one is given."""
    model = official_model(family, dtype=dtype, **settings)
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
