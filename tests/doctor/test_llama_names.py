"""torchtune's and torchtitan's checkpoints in and out. The oracle of most tests is the official class, whose weights a
program of this file puts into their layouts; torchtune's own code is run where it is installed."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from own_codes import IDS, ROPE, assert_same, official, side_by_side
from pairs import assert_close

from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend, write_for

TUNE = {
    "self_attn.q_proj.weight": "attn.q_proj.weight",
    "self_attn.k_proj.weight": "attn.k_proj.weight",
    "self_attn.v_proj.weight": "attn.v_proj.weight",
    "self_attn.q_proj.bias": "attn.q_proj.bias",
    "self_attn.k_proj.bias": "attn.k_proj.bias",
    "self_attn.v_proj.bias": "attn.v_proj.bias",
    "self_attn.o_proj.weight": "attn.output_proj.weight",
    "self_attn.q_norm.weight": "attn.q_norm.scale",
    "self_attn.k_norm.weight": "attn.k_norm.scale",
    "mlp.gate_proj.weight": "mlp.w1.weight",
    "mlp.up_proj.weight": "mlp.w3.weight",
    "mlp.down_proj.weight": "mlp.w2.weight",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
TITAN = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
OUTER = {"model.embed_tokens.weight": "tok_embeddings.weight", "lm_head.weight": "output.weight"}
CODES = {"torchtune": (TUNE, "norm.scale"), "torchtitan": (TITAN, "norm.weight")}


def weights_for(code, model):
    """The weights of an official model as the code has them: Llama's pairs side by side, Qwen's as they are."""
    names, norm = CODES[code]
    outer, found = {**OUTER, "model.norm.weight": norm}, {}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name in outer:
            found[outer[name]] = tensor
            continue
        _, _, layer, inner = name.split(".", 3)
        part = inner.split(".")[1]
        if part in heads and model.config.model_type in ("llama", "mistral"):
            tensor = side_by_side(tensor, heads[part])
        found[f"layers.{layer}.{names[inner]}"] = tensor
    if model.config.tie_word_embeddings:
        del found["output.weight"]
    return found


def save(code, model, folder):
    """A checkpoint as the code saves it: torchtune a pickled file, torchtitan a distributed checkpoint."""
    folder.mkdir()
    if code == "torchtune":
        torch.save(weights_for(code, model), folder / "torchtune_model_0.pt")
    else:
        state = {**weights_for(code, model), "train_state": {"step": torch.tensor(5)}}
        dcp.save(state, checkpoint_id=folder / "step-5", no_dist=True)
        (folder / "step-5").rename(folder / "checkpoint")
    return folder


CASES = [
    ("torchtune", "llama"),
    ("torchtune", "mistral"),
    ("torchtune", "qwen2"),
    ("torchtune", "qwen3"),
    ("torchtitan", "llama"),
    ("torchtitan", "qwen3"),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("code", "family"), CASES)
def test_it_comes_in_with_the_config_that_lies_there(tmp_path, code, family, tied):
    model = official(family, tie_word_embeddings=tied)
    source = save(code, model, tmp_path / "run")
    model.config.save_pretrained(source)
    said = next(each for each in diagnose(source).findings if each.kind == "own-code")
    assert said.sentence == f"this is a checkpoint of {code}, which no library loads"
    mend(source, tmp_path / "out")
    assert_same(model, tmp_path / "out")


@pytest.mark.parametrize(("code", "family"), CASES)
def test_it_comes_in_with_what_the_user_says(tmp_path, code, family):
    model = official(family, rope_parameters=ROPE)
    source = save(code, model, tmp_path / "run")
    with pytest.raises(ConversionError) as caught:
        mend(source, tmp_path / "out")
    asked = "shapes do not show num_attention_heads, rope_parameters, rms_norm_eps, max_position_embeddings"
    assert f"{code} saves no settings, and {asked}" in str(caught.value)
    said = {"num_attention_heads": 4, "rope_parameters": ROPE, "max_position_embeddings": 64}
    said |= {"rms_norm_eps": model.config.rms_norm_eps}
    said |= {"model_type": "mistral", "sliding_window": 6} if family == "mistral" else {}
    mend(source, tmp_path / "out", options=Options(settings=said))
    assert_same(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "official")
    mend(source, tmp_path / "other", against=tmp_path / "official")
    assert_same(model, tmp_path / "other")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("code", "family"), CASES)
def test_it_goes_out(tmp_path, code, family, tied):
    model = official(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "official")
    write_for(tmp_path / "official", tmp_path / "run", code)
    wanted = weights_for(code, model)
    if tied:
        wanted["output.weight"] = wanted["tok_embeddings.weight"]
    if code == "torchtune":
        written = torch.load(tmp_path / "run/torchtune_model.pt", weights_only=True)
    else:
        written = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        dcp.load(written, checkpoint_id=tmp_path / "run/checkpoint", no_dist=True)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    mend(tmp_path / "run", tmp_path / "back")
    assert_same(model, tmp_path / "back")


def test_later_names_of_torchtitan(tmp_path):
    model = official("qwen3")
    inner = {
        name.replace("attention.w", "attention.qkv_linear.w") if name[-8] in "qkv" and ".w" in name[:-7] else name: each
        for name, each in weights_for("torchtitan", model).items()
    }
    inner["lm_head.weight"] = inner.pop("output.weight")
    assert "layers.1.attention.qkv_linear.wk.weight" in inner
    model.config.save_pretrained(tmp_path / "run")
    dcp.save(inner, checkpoint_id=tmp_path / "run/checkpoint", no_dist=True)
    mend(tmp_path / "run", tmp_path / "out")
    assert_same(model, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_the_latest_torchtitan_joins(tmp_path, family):
    model = official(family, tie_word_embeddings=False)
    inner = weights_for("torchtitan", model)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    for layer in range(model.config.num_hidden_layers):
        at = f"layers.{layer}."
        three = [inner.pop(f"{at}attention.w{part}.weight").unflatten(0, (groups, -1)) for part in "qkv"]
        inner[f"{at}attention.qkv_linear.wqkv.weight"] = torch.cat(three, dim=1).flatten(0, 1)
        both = [inner.pop(f"{at}feed_forward.w{part}.weight") for part in "13"]
        inner[f"{at}feed_forward.w13.weight"] = torch.stack(both)
    assert heads > groups
    dcp.save(inner, checkpoint_id=tmp_path / "run/checkpoint", no_dist=True)
    model.config.save_pretrained(tmp_path / "run")
    mend(tmp_path / "run", tmp_path / "out")
    assert_same(model, tmp_path / "out")
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConversionError, match="--set num_key_value_heads=8"):
        mend(tmp_path / "run", tmp_path / "never")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gpt2"}, "config.json has model_type 'gpt2', but the tensors belong to llama"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer, not '4'"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads (3)"),
        ({"num_attention_heads": 64}, "attention heads (64)"),
        ({"intermediate_size": 40}, "[48, 32], the model's is [40, 32]"),
        ({"num_hidden_layers": 3}, "tensors of the model that nothing fills"),
    ],
)
def test_a_config_that_the_tensors_contradict(tmp_path, changed, said):
    model = official("llama")
    source = save("torchtune", model, tmp_path / "run")
    (source / "config.json").write_text(json.dumps(model.config.to_dict() | changed))
    with pytest.raises(ConversionError) as caught:
        mend(source, tmp_path / "out")
    assert said in str(caught.value)


def test_what_is_left_over_or_missing_is_named(tmp_path):
    model = official("llama")
    weights = weights_for("torchtune", model)
    model.config.save_pretrained(tmp_path / "run")
    torch.save({**weights, "layers.0.attn.gate": torch.ones(2)}, tmp_path / "run/model.pt")
    with pytest.raises(ConversionError, match=r"layers\.0\.attn\.gate"):
        mend(tmp_path / "run", tmp_path / "out")
    del weights["layers.1.mlp.w3.weight"]
    torch.save(weights, tmp_path / "run/model.pt")
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        mend(tmp_path / "run", tmp_path / "out")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_torchtunes_own_code_computes_the_same(tmp_path, family):
    """The oracle is torchtune: its builders' models and weights; and it reads what is written for it."""
    pytest.importorskip("torchtune")
    from torchtune.models.llama3 import llama3
    from torchtune.models.qwen2 import qwen2

    sizes = {"vocab_size": 67, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
    sizes |= {"max_seq_len": 64, "rope_base": 50_000, "intermediate_dim": 48, "norm_eps": 1e-5}
    theirs = (llama3 if family == "llama" else qwen2)(**sizes).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3).add_(parameter.ndim == 1)
    (tmp_path / "run").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "run/torchtune_model_0.pt")
    said = {"num_attention_heads": 4, "rope_parameters": ROPE, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    mend(tmp_path / "run", tmp_path / "out", options=Options(settings=said))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(model(IDS).logits, theirs(IDS), 1e-5)
    write_for(tmp_path / "out", tmp_path / "again", "torchtune")
    weights = torch.load(tmp_path / "again/torchtune_model.pt", weights_only=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.state_dict().items())
    theirs.load_state_dict(weights, strict=True)
