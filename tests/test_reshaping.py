"""`reshape`: what each change keeps, to the bit where it keeps all, and what is refused."""

import json

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import STRONG
from transformers import Qwen3Config, Qwen3ForCausalLM

import blockformer
from blockformer import preset, reshape
from blockformer.cli import main
from blockformer.conversion import from_official
from blockformer.model.axes import axes

FOUR_LAYERS = {**STRONG, "num_hidden_layers": 4, "initializer_range": 0.3}
IDS = token_ids(2, 9, vocab=97)


def decoder(name="qwen3", **settings):
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(preset(name, **FOUR_LAYERS, **settings)).eval()


@torch.no_grad()
def logits(model, **inputs):
    return model(IDS, **inputs).logits


def test_layers_are_kept_in_the_order_given():
    model = decoder(
        "gemma3_text", sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=8
    )
    once = reshape(model, layers=range(4))
    assert torch.equal(logits(once), logits(model))
    assert all(getattr(once.config, name) == getattr(model.config, name) for name in axes(type(model.config)))
    less = reshape(model, layers=[3, 1, 1])
    assert less.config.layer_types == ["full_attention"] * 3
    assert less.config.sliding_window is None
    model.model.layers = torch.nn.ModuleList(model.model.layers[each] for each in (3, 1, 1))
    for place, layer in enumerate(model.model.layers):
        layer.layer_idx = place
    model.config.layer_types = less.config.layer_types
    with torch.no_grad():
        assert torch.equal(logits(less), model(IDS, use_cache=False).logits)


def test_heads_are_means_of_their_groups_and_equal_ones_lose_nothing():
    model = decoder("qwen2", num_key_value_heads=4)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                for tensor in (projection.weight, projection.bias):
                    heads = tensor.unflatten(0, (2, 2, 8))
                    heads[:, 1] = heads[:, 0]
    fewer = reshape(model, kv_heads=2)
    assert fewer.config.num_key_value_heads == 2
    assert_close(logits(fewer), logits(model))
    one, before = reshape(model, kv_heads=1), model.model.layers[0].self_attn.v_proj.weight
    assert_close(one.model.layers[0].self_attn.v_proj.weight, before.unflatten(0, (4, 8)).mean(0))


def test_experts_compute_what_the_network_did():
    model = decoder("llama", tie_word_embeddings=True)
    sparse = reshape(model, experts=4)
    assert_close(logits(sparse), logits(model))
    assert sparse.config.num_experts_per_tok == 2
    assert sparse.lm_head.weight is sparse.model.embed_tokens.weight
    assert not torch.equal(sparse.model.layers[0].mlp.gate.weight, sparse.model.layers[1].mlp.gate.weight)
    before = logits(model)
    sparse.train()(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), before)  # nothing is shared


def test_an_encoder_sees_the_whole_text_and_becomes_a_decoder_again():
    model = decoder("llama")
    encoder = reshape(model, topology="encoder")
    assert type(encoder) is blockformer.BlockformerEncoderForMaskedLM
    # What a last token sees in one layer is the same.
    ends = [logits(reshape(model, layers=[0], topology=kind))[:, -1] for kind in ("encoder", None)]
    assert_close(*ends)
    changed = IDS.clone()
    changed[:, -1] = 5
    with torch.no_grad():
        assert not torch.allclose(encoder(changed).logits[:, 0], logits(encoder)[:, 0])
    assert torch.equal(logits(reshape(encoder, topology="decoder")), logits(model))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_two_stacks_of_one(name):
    model = decoder(name, **({"sliding_window": 3} if name == "mistral" else {}))
    both = reshape(model, topology="encoder-decoder")
    assert both.config.decoder_layer_types == model.config.layer_types
    encoder = reshape(model, topology="encoder")
    with torch.no_grad():
        states = both.get_encoder()(IDS).last_hidden_state
        assert torch.equal(states, encoder.model(IDS).last_hidden_state)
    layer = both.model.decoder.layers[2]
    assert torch.equal(layer.cross_attn.v_proj.weight, layer.self_attn.v_proj.weight)
    with torch.no_grad():  # without what it reads there, it is the decoder
        for each in both.model.decoder.layers:
            each.cross_attn.o_proj.weight.zero_()
    assert_close(logits(both, decoder_input_ids=IDS), logits(model))
    assert both.generate(IDS, max_new_tokens=3, do_sample=False).shape[0] == 2


def test_a_bare_stack_stays_bare_and_all_at_once(tmp_path):
    model = blockformer.BlockformerDecoderModel(preset("llama", **FOUR_LAYERS)).to(torch.bfloat16)
    made = reshape(model, layers=[0, 3], kv_heads=2, topology="encoder")
    assert type(made) is blockformer.BlockformerEncoderModel
    assert (made.dtype, made.config.num_hidden_layers, made.config.num_key_value_heads) == (torch.bfloat16, 2, 2)
    blockformer.export_model(made, tmp_path / "repo")
    with torch.no_grad():
        states = blockformer.BlockformerEncoderModel.from_pretrained(tmp_path / "repo")(IDS).last_hidden_state
        assert torch.equal(states, made(IDS).last_hidden_state)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("llama", {"layers": [4]}, "layers must list numbers from 0 to 3"),
        ("llama", {"layers": []}, "layers must list numbers from"),
        ("llama", {"layers": [True, False]}, r"layers must list integers, not \[True, False\]"),
        ("llama", {"layers": "01"}, "layers must list integers, not '01'"),
        ("llama", {"layers": 2}, "layers must list integers, not 2"),
        ("llama", {"kv_heads": "2"}, "kv_heads must be a positive integer, not '2'"),
        ("llama", {"experts": -2}, "experts must be a positive integer, not -2"),
        ("llama", {"experts": 2.0}, r"experts must be a positive integer, not 2\.0"),
        ("llama", {"tie_word_embeddings": True}, "would drop one of two matrices that differ: leave it out"),
        ("llama", {"kv_heads": 3}, "must divide the model's 4"),
        ("llama", {"num_key_value_heads": 2}, r"k_proj.weight is \[.*, the old one.s .*: reshape changes sizes"),
        ("llama", {"num_hidden_layers": 2}, r"num_hidden_layers=2 does not say which: name the layers to keep"),
        ("llama", {"topology": "coder"}, "must be one of decoder, encoder"),
        ("gpt2", {"experts": 2}, "gated feed-forward networks without biases"),
        ("mixtral", {"experts": 2}, "already has experts"),
        ("mixtral", {"topology": "encoder"}, "has no num_experts"),
        ("bloom", {"topology": "encoder"}, "alibi"),
    ],
)
def test_what_has_no_such_shape_is_refused(name, shape, named):
    with pytest.raises(ValueError, match=named):
        reshape(decoder(name), **shape)


def test_a_bidirectional_decoder_is_an_encoder_already():
    model = decoder("llama", bidirectional=True)
    ids = torch.randint(3, 50, (2, 9))
    made = reshape(model, topology="encoder")
    torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    again = reshape(made, topology="decoder", bidirectional=True)
    assert torch.equal(again(ids).logits, model(ids).logits)
    two = reshape(model, topology="encoder-decoder").model
    states = model.model(ids).last_hidden_state
    torch.testing.assert_close(two.encoder(ids).last_hidden_state, states, rtol=1e-5, atol=1e-5)


def test_weights_that_are_elsewhere_are_asked_for():
    with torch.device("meta"):
        model = decoder("llama")
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is not in memory, .*: load the whole model"):
        reshape(model, layers=[0])


def test_other_models_are_refused():
    shared = blockformer.BlockformerEncoderModel(preset("albert", **FOUR_LAYERS))
    for shape, named in (
        ({"layers": [0]}, "whose layers share weights"),
        ({"topology": "decoder"}, "has no num_hidden_groups"),
    ):
        with pytest.raises(ValueError, match=named):
            reshape(shared, **shape)
    config = preset("llama", **FOUR_LAYERS)
    with pytest.raises(ValueError, match="ForSequenceClassification cannot be reshaped"):
        reshape(blockformer.BlockformerDecoderForSequenceClassification(config), layers=[0])
    low = preset(
        "qwen3", **FOUR_LAYERS | {"hidden_size": 64, "intermediate_size": 64}, linear_bits=4, linear_group_size=32
    )
    with pytest.raises(ValueError, match="4-bit weights"):
        reshape(blockformer.BlockformerDecoderForCausalLM(low), layers=[0])
    without = decoder("modernbert-decoder")
    with pytest.raises(ValueError, match="change the settings given"):
        reshape(without, layers=[1])


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code or 0, capsys.readouterr()


def test_the_command_line(tmp_path, capsys, tiny_tokenizer):
    model = Qwen3ForCausalLM(Qwen3Config(**FOUR_LAYERS, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "official")
    tiny_tokenizer.save_pretrained(tmp_path / "official")
    shape = ("--as", "encoder", "--layers", "0,2-3", "--kv-heads", 2)
    code, told = run(capsys, "convert", tmp_path / "official", tmp_path / "repo", *shape)
    assert code == 0, told.err
    assert "needs training" in told.out
    card = (tmp_path / "repo/README.md").read_text()
    assert "Blockformer turned it into an encoder and took only its layers 0, 2, 3 and averaged" in card
    made = blockformer.BlockformerEncoderForMaskedLM.from_pretrained(tmp_path / "repo")
    wanted = reshape(from_official(tmp_path / "official"), topology="encoder", layers=[0, 2, 3], kv_heads=2)
    assert torch.equal(logits(made), logits(wanted))
    assert (tmp_path / "repo/tokenizer.json").exists()
    assert "modeling_encoder" in json.loads((tmp_path / "repo/config.json").read_text())["auto_map"]["AutoModel"]
    again = run(capsys, "convert", tmp_path / "repo", tmp_path / "again", "--layers", "0")
    assert again[0] == 0, again[1].err
    assert all(blockformer.verify(tmp_path / name).problems == {} for name in ("repo", "again"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--layers", "1-"), "must be a list such as"),
        (("--layers", "9"), "layers must list numbers from 0 to 3"),
        (("--experts", 2, "--to", "official"), "cannot be combined with --to official"),
        (("--as", "oracle"), "must be one of decoder"),
    ],
)
def test_what_the_command_line_refuses_leaves_nothing(tmp_path, capsys, arguments, named):
    decoder().save_pretrained(tmp_path / "ours")
    code, told = run(capsys, "convert", tmp_path / "ours", tmp_path / "repo", *arguments)
    assert code != 0
    assert named in " ".join(told.err.split())
    assert not (tmp_path / "repo").exists()
