"""litgpt's checkpoints in and out. The oracle of most tests is the official class, whose weights a program of this file
puts into litgpt's layout; litgpt's own code is run where it is installed."""

import dataclasses
import json

import pytest
import torch
import transformers
import yaml
from own_codes import IDS, LLAMA3, assert_same, official
from pairs import assert_close

from blockformer.conversion import ConversionError, convert
from blockformer.doctor import diagnose, mend, write_for

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi")
NAMES = {
    "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.norm_q",
    "self_attn.k_norm": "attn.norm_k",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "attention.dense": "attn.proj",
    "mlp.dense_h_to_4h": "mlp.fc",
    "mlp.dense_4h_to_h": "mlp.proj",
    "self_attn.dense": "attn.proj",
    "mlp.fc1": "mlp.fc",
    "mlp.fc2": "mlp.proj",
}
OUTER = {
    "embed_tokens": "transformer.wte",
    "embed_in": "transformer.wte",
    "norm": "transformer.ln_f",
    "final_layer_norm": "transformer.ln_f",
    "final_layernorm": "transformer.ln_f",
    "lm_head": "lm_head",
    "embed_out": "lm_head",
}


def as_litgpt(model, earlier=False):
    """The weights of an official model as litgpt has them; `earlier`: each key/value head with its queries."""
    config, weights = model.config, {}
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    state = {name.removeprefix("model.").removeprefix("gpt_neox."): each for name, each in model.state_dict().items()}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".", 2)
        if parts[0] != "layers":
            weights[f"{OUTER[module]}.{kind}"] = tensor
            continue
        start, inner = f"transformer.h.{parts[1]}.", parts[2]
        if inner in NAMES:
            weights[f"{start}{NAMES[inner]}.{kind}"] = tensor
        elif inner == "self_attn.q_proj":
            three = [state[f"layers.{parts[1]}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
            weights |= {f"{start}attn.qkv.{kind}": torch.cat(three)}
        elif inner == "attention.query_key_value":
            by_head = tensor.unflatten(0, (config.num_attention_heads, 3, -1))
            weights[f"{start}attn.qkv.{kind}"] = by_head.transpose(0, 1).flatten(0, 2)
    if earlier:
        for name in [each for each in weights if ".qkv." in each]:
            size = weights[name].shape[0] // (config.num_attention_heads + 2 * groups)
            q, k, v = weights.pop(name).split([config.num_attention_heads * size, groups * size, groups * size])
            parts = [part.unflatten(0, (groups, -1)) for part in (q, k, v)]
            weights[name.replace(".qkv.", ".attn.")] = torch.cat(parts, dim=1).flatten(0, 1)
    return weights


def settings_of(model):
    """What litgpt writes into `model_config.yaml` for such a model, without what is its default."""
    config, rope = model.config, model.config.rope_parameters
    settings = {
        "name": "small",
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size - 3,
        "padded_vocab_size": config.vocab_size,
        "rope_base": int(rope["rope_theta"]),
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "n_query_groups": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    if config.model_type in ("gpt_neox", "phi"):
        settings |= {"rotary_percentage": rope["partial_rotary_factor"], "norm_eps": config.layer_norm_eps}
        settings |= {"gelu_approximate": "tanh" if config.hidden_act == "gelu_new" else "none"}
        is_phi = config.model_type == "phi"
        return settings | {"shared_attention_norm": is_phi, "lm_head_bias": is_phi}
    settings |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "norm_eps": config.rms_norm_eps}
    settings |= {"bias": False, "parallel_residual": False, "rotary_percentage": 1.0}
    settings |= {"attn_bias": config.model_type == "qwen2", "norm_qk": config.model_type == "qwen3"}
    if rope["rope_type"] == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        settings["rope_adjustments"] = {name: rope[name] for name in names}
        settings["rope_adjustments"]["original_max_seq_len"] = LLAMA3["original_max_position_embeddings"]
    if config.model_type == "mistral":
        settings["sliding_window_size"] = config.sliding_window
    return settings


def write_litgpt(model, folder, **how):
    folder.mkdir()
    torch.save({"model": as_litgpt(model, **how)}, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(settings_of(model)))
    return folder


@pytest.mark.parametrize("earlier", [False, True], ids=["todays", "earlier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_comes_in(tmp_path, family, earlier):
    model = official(family)
    source = write_litgpt(model, tmp_path / "lit", earlier=earlier)
    said = next(each for each in diagnose(source).findings if each.kind == "own-code")
    assert said.sentence == "this is a checkpoint of litgpt, which no library loads"
    assert said.remedy == f"--mend writes it as {type(model).__name__}, which computes the same"
    mend(source, tmp_path / "out")
    assert_same(model, tmp_path / "out")
    assert diagnose(tmp_path / "out", quick=True).status == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_it_goes_out(tmp_path, family):
    model = official(family)
    model.save_pretrained(tmp_path / "official")
    write_for(tmp_path / "official", tmp_path / "lit", "litgpt")
    written = torch.load(tmp_path / "lit/lit_model.pth", weights_only=True)
    wanted = as_litgpt(model)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    settings = yaml.safe_load((tmp_path / "lit/model_config.yaml").read_text())
    theirs = settings_of(model)
    differ = {"name": "", "vocab_size": 67, "head_size": settings["head_size"], "norm_eps": settings["norm_eps"]}
    assert {name: settings[name] for name in theirs} == theirs | differ
    mend(tmp_path / "lit", tmp_path / "back")
    assert_same(model, tmp_path / "back")
    entries = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("official", "back")]
    assert entries[0]["eos_token_id"] == entries[1]["eos_token_id"] == 2


def test_a_repo_of_ours_with_a_tied_head_goes_out(tmp_path):
    model = official("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "official")
    convert(tmp_path / "official", tmp_path / "ours", verify="none")
    write_for(tmp_path / "ours", tmp_path / "lit", "litgpt")
    written = torch.load(tmp_path / "lit/lit_model.pth", weights_only=True)
    assert torch.equal(written["lm_head.weight"], written["transformer.wte.weight"])
    mend(tmp_path / "lit", tmp_path / "back")
    assert_same(model, tmp_path / "back")


REFUSED = {
    "experts": ({"n_expert": 8}, "n_expert is 8, not 0"),
    "cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "norms": ({"name": "Gemma-2b"}, "its name has 'Gemma'"),
    "layers": ({"n_layer": 3}, "tensors of the model that nothing fills"),
    "yarn": ({"rope_adjustments": {"factor": 2.0, "beta_fast": 32}}, "rope_adjustments is"),
    "windows": (
        {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
        "sliding_window_size is 4 in some layers",
    ),
    "text": ({"n_head": "4"}, "its model_config.yaml lacks 'n_head'"),
    "base": ({"rope_base": "fast"}, "the settings in model_config.yaml do not belong to litgpt: ValueError: could not"),
    "size": ({"head_size": [8]}, "head_dim"),
    "eps": ({"norm_eps": "tiny"}, "rms_norm_eps"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_counterpart_is_named(tmp_path, what):
    changed, said = REFUSED[what]
    source = write_litgpt(official("llama"), tmp_path / "lit")
    path = source / "model_config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changed))
    with pytest.raises(ConversionError, match="this is a checkpoint of litgpt") as caught:
        mend(source, tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["no settings", "cut settings", "cut weights", "left over"])
def test_damaged_files(tmp_path, damage):
    source = write_litgpt(official("llama"), tmp_path / "lit")
    if damage == "no settings":
        (source / "model_config.yaml").unlink()
        said = "model_config.yaml with its settings is missing; copy it next to the weights"
    elif damage == "cut settings":
        (source / "model_config.yaml").write_text("rope_adjustments: {factor: 8.0, low_freq")
        said = "not YAML, or cut short; copy it again"
    elif damage == "cut weights":
        path = source / "lit_model.pth"
        path.write_bytes(path.read_bytes()[:-200])
        said = "lit_model.pth"
    else:
        weights = torch.load(source / "lit_model.pth", weights_only=True)["model"]
        torch.save({**weights, "transformer.h.0.attn.extra": torch.ones(3)}, source / "lit_model.pth")
        said = "'transformer.h.0.attn.extra'"
    with pytest.raises(ConversionError) as caught:
        mend(source, tmp_path / "out")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("llama", {"attention_bias": True}, "self_attn.q_proj.bias"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters is"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "layer_types is"),
    ],
)
def test_what_litgpt_has_no_place_for_is_not_written(tmp_path, family, more, said):
    official(family, **more).save_pretrained(tmp_path / "official")
    with pytest.raises(ConversionError) as caught:
        write_for(tmp_path / "official", tmp_path / "lit", "litgpt")
    assert said in str(caught.value)
    assert not (tmp_path / "lit").exists()


def test_a_family_that_litgpt_lacks_is_not_written(tmp_path):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "official")
    with pytest.raises(ConversionError, match="litgpt has no model of the family 'gpt2'; it has llama, mistral"):
        write_for(tmp_path / "official", tmp_path / "lit", "litgpt")
    with pytest.raises(ConversionError, match="'lit' cannot be written; name one of litgpt"):
        write_for(tmp_path / "official", tmp_path / "lit", "lit")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_litgpts_own_code_computes_the_same(tmp_path, family):
    """The oracle is litgpt: its model, its weights, its settings file; and it reads what is written for it."""
    litgpt = pytest.importorskip("litgpt.model")
    config = litgpt.Config(**settings_of(official(family)))
    theirs = litgpt.GPT(config).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3).add_(parameter.ndim == 1)
    (tmp_path / "lit").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "lit/lit_model.pth")
    (tmp_path / "lit/model_config.yaml").write_text(yaml.dump(dataclasses.asdict(config)))
    mend(tmp_path / "lit", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(model(IDS).logits, theirs(IDS), 1e-5)
    write_for(tmp_path / "out", tmp_path / "again", "litgpt")
    weights = torch.load(tmp_path / "again/lit_model.pth", weights_only=True)
    again = litgpt.GPT(litgpt.Config.from_checkpoint(tmp_path / "again")).eval()
    again.load_state_dict(weights, strict=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.state_dict().items())
    assert torch.equal(again(IDS), theirs(IDS))
