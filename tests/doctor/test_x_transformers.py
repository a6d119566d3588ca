"""x-transformers' plain decoder and encoder. The oracle is its own code where it is installed; elsewhere the weights
are written by a program of this file and computed by the formulas of its plain layers."""

import pytest
import torch
import transformers
from own_codes import IDS
from pairs import assert_close
from torch.nn import functional as F

import blockformer
from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend, write_for

from ..conversion.oracles import edit_config, stored

WIDTH, HEADS, SIZE, INNER = 32, 4, 16, 128
DECODER = {"model_type": "blockformer_decoder", "num_attention_heads": HEADS, "hidden_act": "gelu"}
DECODER["norm_weight"] = "zero_centered"
ENCODER = {**DECODER, "model_type": "blockformer_encoder"}
ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 64}


def plain(width=WIDTH):
    """Weights of a plain model of two layers, with learned positions."""
    names = {"token_emb.emb.weight": torch.randn(67, width), "pos_emb.emb.weight": torch.randn(64, width) * 9}
    for layer in range(2):
        attention, network = f"attn_layers.layers.{2 * layer}", f"attn_layers.layers.{2 * layer + 1}"
        for name in "qkv":
            names[f"{attention}.1.to_{name}.weight"] = torch.randn(HEADS * SIZE, width) * 0.3
        names[f"{attention}.1.to_out.weight"] = torch.randn(width, HEADS * SIZE) * 0.3
        names[f"{network}.1.ff.0.0.weight"] = torch.randn(INNER, width) * 0.3
        names[f"{network}.1.ff.0.0.bias"] = torch.randn(INNER) * 0.3
        names[f"{network}.1.ff.2.weight"] = torch.randn(width, INNER) * 0.3
        names[f"{network}.1.ff.2.bias"] = torch.randn(width) * 0.3
        for place in (attention, network):
            names[f"{place}.0.0.gamma"] = 1 + torch.randn(width) * 0.3
    names["attn_layers.final_norm.gamma"] = 1 + torch.randn(width) * 0.3
    return {**names, "to_logits.weight": torch.randn(67, width) * 0.3}


def logits_of(weights, ids, causal, offset):
    """Pre-norm layers without biases in norms and attention; learned positions times one over the root of the width.

    Args:
        weights, ids: of the model, [B, T].
        causal: whether it is a decoder.
        offset: what is added to the factor of a norm.
    """

    def norm(name, states):
        return F.layer_norm(states, states.shape[-1:]) * (weights[f"{name}.gamma"] + offset)

    positions = weights["pos_emb.emb.weight"][: ids.shape[1]] * WIDTH**-0.5
    states = weights["token_emb.emb.weight"][ids] + positions
    for layer in range(2):
        at = f"attn_layers.layers.{2 * layer}"
        read = norm(f"{at}.0.0", states)
        q, k, v = (
            F.linear(read, weights[f"{at}.1.to_{name}.weight"]).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        states = states + F.linear(mixed, weights[f"{at}.1.to_out.weight"])
        at = f"attn_layers.layers.{2 * layer + 1}"
        inner = F.linear(norm(f"{at}.0.0", states), weights[f"{at}.1.ff.0.0.weight"], weights[f"{at}.1.ff.0.0.bias"])
        states = states + F.linear(F.gelu(inner), weights[f"{at}.1.ff.2.weight"], weights[f"{at}.1.ff.2.bias"])
    return F.linear(norm("attn_layers.final_norm", states), weights["to_logits.weight"])


def loaded(folder):
    auto = {"d": transformers.AutoModelForCausalLM, "e": transformers.AutoModelForMaskedLM}
    kind = transformers.AutoConfig.from_pretrained(folder).model_type.partition("_")[2]
    return auto[kind[0]].from_pretrained(folder).eval()


@torch.no_grad()
@pytest.mark.parametrize("factor", ["zero_centered", "plain"])
@pytest.mark.parametrize("kind", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_it_comes_in(tmp_path, kind, factor):
    weights = plain()
    torch.save({"model_state_dict": weights, "step": 7}, tmp_path / "last.pt")
    said = next(each for each in diagnose(tmp_path / "last.pt").findings if each.kind == "own-code")
    assert said.sentence == "this is a checkpoint of x-transformers, which no library loads"
    assert "--set model_type=... (blockformer_decoder (causal) or blockformer_encoder)" in said.remedy
    assert "--set num_attention_heads=... (heads)" in said.remedy
    mend(tmp_path / "last.pt", tmp_path / "out", options=Options(settings={**kind, "norm_weight": factor}))
    wanted = logits_of(weights, IDS, causal=kind is DECODER, offset=int(factor == "zero_centered"))
    assert_close(loaded(tmp_path / "out")(IDS).logits, wanted, 1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attn_layers.layers.0.1.qk_norm_q_scale": torch.ones(4, 1, 16)}, "qk_norm_q_scale"),
        ({"attn_layers.layers.0.1.mem_k": torch.ones(4, 2, 16)}, "mem_k"),
        ({"attn_layers.rotary_pos_emb.inv_freq": torch.ones(4)}, "its positions are learned and rotary at once"),
        ({"pos_emb.emb.weight": None}, "it has neither a table of positions nor rotary ones"),
        ({"attn_layers.final_norm.gamma": None}, "it has no final norm with a factor"),
        ({"attn_layers.layers.3.1.ff.2.weight": None}, "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_what_is_not_plain_is_named(tmp_path, more, said):
    weights = {name: each for name, each in {**plain(), **more}.items() if each is not None}
    torch.save(weights, tmp_path / "model.pt")
    rotation = ROTATION if "attn_layers.rotary_pos_emb.inv_freq" in weights else {}
    with pytest.raises(ConversionError) as caught:
        mend(tmp_path / "model.pt", tmp_path / "out", options=Options(settings={**DECODER, **rotation}))
    assert said in str(caught.value)


def test_a_tied_head_has_a_factor_that_must_be_said(tmp_path):
    weights = plain()
    del weights["to_logits.weight"]
    torch.save(weights, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"--set logit_scale=\.\.\. \(tie_embedding_scale"):
        mend(tmp_path / "model.pt", tmp_path / "out", options=Options(settings=DECODER))


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"model_type": "gpt2"}, "model_type is 'gpt2'"), ({"num_attention_heads": 0}, "num_attention_heads is 0")],
)
def test_answers_that_cannot_be(tmp_path, changed, said):
    torch.save(plain(), tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=said):
        mend(tmp_path / "model.pt", tmp_path / "out", options=Options(settings={**DECODER, **changed}))


ARGUMENTS = {
    "decoder": {"depth": 2, "heads": 4, "attn_dim_head": 16},
    "encoder": {"depth": 2, "heads": 4, "attn_dim_head": 16},
    "llama": {
        **dict.fromkeys(("rotary_pos_emb", "use_rmsnorm", "ff_glu", "ff_swish", "ff_no_bias"), True),
        "depth": 2,
        "heads": 4,
        "attn_dim_head": 16,
        "attn_kv_heads": 2,
    },
    "relu": {"depth": 2, "heads": 4, "attn_dim_head": 8, "ff_relu_squared": True, "ff_mult": 2},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_its_own_code_computes_the_same(tmp_path, kind):
    """The oracle is x-transformers: its model and weights."""
    library = pytest.importorskip("x_transformers")
    stack = (library.Encoder if kind == "encoder" else library.Decoder)(dim=64, **ARGUMENTS[kind])
    wrapped = {"use_abs_pos_emb": kind != "llama", "tie_embedding": kind == "relu"}
    theirs = library.TransformerWrapper(num_tokens=67, max_seq_len=64, attn_layers=stack, **wrapped).eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    said = {**(ENCODER if kind == "encoder" else DECODER), **(ROTATION if kind == "llama" else {})}
    said |= {"logit_scale": 0.125} if kind == "relu" else {}
    said["hidden_act"] = {"llama": "silu", "relu": "relu2"}.get(kind, "gelu")
    mend(tmp_path / "model.pt", tmp_path / "out", options=Options(settings=said))
    assert_close(loaded(tmp_path / "out")(IDS).logits, theirs(IDS), 1e-5)
    write_for(tmp_path / "out", tmp_path / "back", "x-transformers")
    again = torch.load(tmp_path / "back/model.pt", weights_only=True)
    wanted = theirs.state_dict()
    assert again.keys() == wanted.keys()
    theirs.load_state_dict(again)
    assert all(torch.equal(again[name], wanted[name]) for name in again if "inv_freq" not in name)


@torch.no_grad()
def test_an_encoder_of_ours_without_a_head_goes_out(tmp_path):
    """The oracle is x-transformers where it is installed; there and back, the weights are the same."""
    torch.save({name: each for name, each in plain(64).items() if "to_logits" not in name}, tmp_path / "model.pt")
    bare = {**ENCODER, "architectures": ["BlockformerEncoderModel"]}
    mend(tmp_path / "model.pt", tmp_path / "ours", options=Options(settings=bare))
    write_for(tmp_path / "ours", tmp_path / "out", "x-transformers")
    again = torch.load(tmp_path / "out/model.pt", weights_only=True)
    given = torch.load(tmp_path / "model.pt", weights_only=True)
    assert again.keys() == given.keys()
    assert all(torch.equal(again[name], given[name]) for name in given)
    library = pytest.importorskip("x_transformers")
    stack = library.Encoder(dim=64, depth=2, heads=HEADS, attn_dim_head=SIZE, ff_mult=2)
    theirs = library.TransformerWrapper(num_tokens=67, max_seq_len=64, attn_layers=stack, return_only_embed=True).eval()
    theirs.load_state_dict(again)
    ours = transformers.AutoModel.from_pretrained(tmp_path / "ours").eval()
    assert_close(ours(IDS).last_hidden_state, theirs(IDS), 1e-5)


def test_a_head_that_it_has_no_place_for_is_named(tmp_path):
    torch.save(plain(64), tmp_path / "last.pt")
    mend(tmp_path / "last.pt", tmp_path / "ours", options=Options(settings=ENCODER))
    model = blockformer.BlockformerEncoderForSequenceClassification.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ConversionError, match="no place for the head of a BlockformerEncoderForSequenceClassification"):
        write_for(tmp_path / "tuned", tmp_path / "out", "x-transformers")


@pytest.mark.parametrize("said", [DECODER, ENCODER], ids=["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["learned", "rotary", "tied"])
def test_it_goes_out(tmp_path, kind, said):
    weights = plain(64)
    said = dict(said)
    if kind == "rotary":
        del weights["pos_emb.emb.weight"]
        weights["attn_layers.rotary_pos_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
        said |= ROTATION
    if kind == "tied":
        del weights["to_logits.weight"]
        said["logit_scale"] = 0.125
    torch.save(weights, tmp_path / "last.pt")
    mend(tmp_path / "last.pt", tmp_path / "ours", options=Options(settings=said))
    write_for(tmp_path / "ours", tmp_path / "out", "x-transformers")
    again = torch.load(tmp_path / "out/model.pt", weights_only=True)
    assert again.keys() == weights.keys()
    assert all(torch.allclose(again[name], weights[name], atol=0, rtol=1e-6) for name in weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights if "inv_freq" not in name)
    mend(tmp_path / "out", tmp_path / "again")  # with the settings that lie there
    assert stored(tmp_path / "again") == stored(tmp_path / "ours")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sliding_window": 6, "layer_types": ["sliding_attention"] * 2}, "sliding_window is 6, and None there"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06, and 1e-05 there"),
        ({"final_logit_softcapping": 5.0}, "final_logit_softcapping is 5.0, and None there"),
    ],
)
def test_what_it_has_no_place_for_is_named(tmp_path, changed, said):
    torch.save(plain(64), tmp_path / "last.pt")
    mend(tmp_path / "last.pt", tmp_path / "ours", options=Options(settings=DECODER))
    edit_config(tmp_path / "ours", **changed)
    with pytest.raises(ConversionError, match=said):
        write_for(tmp_path / "ours", tmp_path / "out", "x-transformers")
    assert not (tmp_path / "out").exists()
