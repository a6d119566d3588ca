"""The stack: positions and masks of a batch, what it captures, dropout after its norm, two stacks under one config."""

import copy

import pytest
import torch
from encoder_decoders import SMALL, VOCAB, t5_pair, target
from pairs import assert_close, assert_gradients_close, model, pair, token_ids
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2Model,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MarianConfig,
    MarianModel,
    T5Config,
    T5Model,
)

import blockformer
from blockformer import (
    BlockformerDecoderForCausalLM,
    BlockformerDecoderModel,
    BlockformerEncoderDecoderModel,
    BlockformerEncoderModel,
    preset,
)


def test_left_padding_shifts_no_position():
    """Positions count tokens, so a row gives the same states however it is padded, for absolute positions too."""
    for position_type in ("learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative_bias", "relative_key"):
        settings = {} if position_type == "rotary" else {"rope_parameters": None}
        ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **settings)
        ids = token_ids(1, 7)
        padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), ids), dim=1)
        mask = torch.cat((torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)), dim=1)
        assert_close(ours(padded, mask).last_hidden_state[:, 5:], ours(ids).last_hidden_state)


@pytest.mark.portable
def test_captured_states_and_attentions_are_those_of_transformers():
    ours, theirs = pair("qwen3")
    for one in (ours, theirs):
        one.set_attn_implementation("eager")
    ids = token_ids(2, 11)
    mine = ours(ids, output_hidden_states=True, output_attentions=True)
    official = theirs(ids, output_hidden_states=True, output_attentions=True)
    for kind, count in (("hidden_states", 4), ("attentions", 3)):
        assert len(mine[kind]) == count
        for one, other in zip(mine[kind], official[kind], strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learned_positions_are_added_to_narrower_embeddings_in_their_own_dtype(dtype, tmp_path):
    """A soft prompt may be in half precision where the model is in float32."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "initializer_range": 0.5}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes)).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    embeds = ours.get_input_embeddings()(token_ids(2, 9, vocab=VOCAB)).detach().to(dtype)
    assert_close(ours(inputs_embeds=embeds).logits, theirs(inputs_embeds=embeds).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinusoids_are_added_to_narrower_embeddings_in_the_model_s_dtype(dtype, tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16, "init_std": 0.5}
    sizes |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1, "decoder_start_token_id": 0}
    theirs = MarianModel(MarianConfig(vocab_size=VOCAB, **sizes, **tokens)).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = blockformer.from_official(tmp_path).eval(), token_ids(2, 9, vocab=VOCAB)
    embeds = theirs.get_input_embeddings()(ids).detach().to(dtype)
    given = {"inputs_embeds": embeds, "decoder_inputs_embeds": embeds}
    assert_close(ours(**given).last_hidden_state, theirs(**given).last_hidden_state)


maps = pytest.mark.skipif(not hasattr(torch.func, "debug_unwrap"), reason="torch.func.debug_unwrap came with torch 2.7")


@maps
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("family", ["bert", "qwen3", "gemma2", "t5"])
@torch.no_grad()
def test_vmap_over_tokens(family):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = {"bert": "EncoderModel", "t5": "EncoderDecoderModel"}.get(family, "DecoderModel")
    torch.manual_seed(0)
    ours = getattr(blockformer, f"Blockformer{kind}")(preset(family, **sizes, pad_token_id=0)).eval()
    ids = token_ids(6, 7, vocab=97).view(3, 2, 7)
    more = (lambda ids: {"decoder_input_ids": ids}) if family == "t5" else lambda ids: {}
    for _ in range(2):
        mapped = torch.func.vmap(lambda ids: ours(ids, **more(ids))[0])(ids)
        assert_close(mapped, torch.stack([ours(each, **more(each))[0] for each in ids]))
        ours.prepare_for_inference()


@maps
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_samples_gives_the_gradient_of_each():
    ours, ids = model("qwen3", cls=BlockformerDecoderForCausalLM), token_ids(3, 7)
    weights = dict(ours.named_parameters())

    def loss(weights, ids):
        return torch.func.functional_call(ours, weights, (), {"input_ids": ids[None], "labels": ids[None]}).loss

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids)
    for index, row in enumerate(ids):
        expected = torch.autograd.grad(ours(row[None], labels=row[None]).loss, tuple(weights.values()))
        assert_gradients_close(
            {name: gradient[index] for name, gradient in gradients.items()},
            dict(zip(weights, expected, strict=True)),
        )


@maps
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_vmap_over_masks_asks_for_ready_ones():
    ours, ids, mask = model("qwen3"), token_ids(6, 7).view(3, 2, 7), torch.ones(3, 2, 7, dtype=torch.long)
    mask[0, 1, :3] = 0
    call = torch.func.vmap(lambda ids, mask: ours(ids, attention_mask=mask).logits)
    with pytest.raises(ValueError, match=r"attention_mask cannot be read under torch.func.vmap: pass bool"):
        call(ids, mask)
    ready = torch.ones(7, 7, dtype=torch.bool).tril() & mask[..., None, None, :].bool()
    assert_close(call(ids, ready), torch.stack([ours(*each).logits for each in zip(ids, ready, strict=True)]))
    ours.set_attn_implementation("eager")
    expected = torch.stack([ours(*each).logits for each in zip(ids, mask, strict=True)])
    assert_close(call(ids, mask)[mask.bool()], expected[mask.bool()])
    encoder = model("bert", cls=BlockformerEncoderModel)
    with pytest.raises(ValueError, match="or do not map it"):
        torch.func.vmap(lambda ids, mask: encoder(ids, attention_mask=mask)[0])(ids, mask)


def test_boolean_and_four_dimensional_masks_are_taken():
    decoder, ids, mask = model("qwen3"), token_ids(1, 5), torch.ones(1, 5, dtype=torch.long)
    expected = decoder(ids).logits
    assert_close(decoder(ids, attention_mask=mask.bool()).logits, expected)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    assert_close(decoder(ids, attention_mask=causal).logits, expected)


@pytest.mark.parametrize("preset", ["qwen3", "bert"])
def test_a_mask_of_ones_is_left_out_and_says_what_it_said(preset):
    """Where it was read: positions beside it name one sequence, and a graph that is traced with it keeps it."""
    cls = {"cls": blockformer.BlockformerEncoderModel} if preset == "bert" else {}
    ours, tokens, positions = model(preset, **cls), token_ids(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    body = ours.base_model
    causal = torch.ones(6, 6, dtype=torch.bool).tril() if body.is_causal else torch.ones(6, 6, dtype=torch.bool)
    mask = torch.ones(2, 6, dtype=torch.long)
    expected = body(tokens, attention_mask=causal.expand(2, 1, 6, 6), position_ids=positions).last_hidden_state
    assert_close(body(tokens, attention_mask=mask, position_ids=positions).last_hidden_state, expected)

    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, tokens, mask):
            return self.body(tokens, attention_mask=mask).last_hidden_state

    body.config.use_cache = False
    padded = mask.clone()
    padded[0, -2:] = 0
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(Traced(), (tokens, mask), check_trace=False)
    assert_close(traced(tokens, padded)[0, :4], body(tokens, attention_mask=padded).last_hidden_state[0, :4])


def dropped(name, folder):
    """Ours and transformers' model of the same weights, both with dropout, and what a call reads."""
    sizes, given = {"vocab_size": VOCAB, "initializer_range": 0.3}, {}
    if name == "bert":
        small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
        theirs = BertModel(BertConfig(**sizes, **small))
    elif name == "gpt2":
        theirs = GPT2LMHeadModel(GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2))
    elif name == "deberta":
        small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
        kinds = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        kinds |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
        theirs = DebertaV2Model(DebertaV2Config(**sizes, **small, **kinds, type_vocab_size=0))
    else:
        theirs, given = t5_pair(folder)[1], {"decoder_input_ids": target(2, 4)}
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder), theirs.eval(), given | {"input_ids": token_ids(2, 9, vocab=VOCAB)}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "deberta", "t5"])
@torch.no_grad()
def test_dropout_is_found_where_users_switch_it(name, prepared, tmp_path):
    """On in evaluation, to see how sure a model is; off in training, as TRL's trainers have it; or replaced."""
    *models, given = dropped(name, tmp_path)
    if prepared:
        models[0].prepare_for_inference()
    for each in models:
        quiet = each(**given)[0]
        parts = [part for part in each.modules() if isinstance(part, torch.nn.Dropout)]
        for part in parts:
            part.train()
        assert not torch.equal(each(**given)[0], each(**given)[0])
        each.train()
        for part in parts:
            part.p = 0
        if name != "t5":  # whose official attention drops out by a number
            assert_close(each(**given)[0], quiet)
    for part in models[0].modules():
        for child, module in part.named_children():
            if isinstance(module, torch.nn.Dropout):
                setattr(part, child, torch.nn.Identity())
    assert_close(models[0].eval()(**given)[0], models[1].eval()(**given)[0])


@torch.no_grad()
def test_training_drops_out_what_the_final_norm_gives_as_t5_does():
    """At p = 0.5 half of a stack's states are 0; at p = 1 all of them."""
    for probability, share in ((0.5, 0.5), (1.0, 1.0)):
        settings = {name: 64 if name == "d_model" else 2 for name in ("d_model", "num_layers", "num_heads")}
        official = T5Config(vocab_size=VOCAB, d_kv=16, d_ff=80, dropout_rate=probability, **settings)
        theirs = T5Model(official).train()
        ours = BlockformerEncoderDecoderModel(preset("t5", **SMALL, hidden_dropout=probability)).train()
        for one in (theirs, ours):
            states = one(input_ids=target(), decoder_input_ids=target())
            for name in ("last_hidden_state", "encoder_last_hidden_state"):
                assert ((states[name] == 0).float().mean() - share).abs() < 0.1


def test_both_stacks_share_the_models_config():
    """What is set on the model reaches them; a cache is sized by a copy that has the decoder's numbers."""
    config = blockformer.BlockformerEncoderDecoderConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        decoder_layers=3,
        decoder_intermediate_size=40,
        decoder_vocab_size=40,
        share_embeddings=False,
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config)
    encoder, decoder = model.get_encoder(), model.get_decoder()
    assert encoder.config is decoder.config is model.config is config
    assert config.d_model == 32
    assert (len(encoder.layers), len(decoder.layers)) == (2, 3)
    assert [stack.layers[1].mlp.up_proj.out_features for stack in (encoder, decoder)] == [48, 40]
    assert (encoder.embed_tokens.num_embeddings, decoder.embed_tokens.num_embeddings) == (50, 40)
    side = config.get_text_config(decoder=True)
    assert (side.num_hidden_layers, side.vocab_size, len(side.layer_types)) == (3, 40, 3)
    assert (side.intermediate_size, config.intermediate_size) == (40, 48)
    assert (config.num_hidden_layers, config.vocab_size) == (2, 50)
    model.resize_decoder_token_embeddings(44)
    assert (config.vocab_size, config.decoder_vocab_size, model.lm_head.out_features) == (50, 44, 44)
    model.set_attn_implementation("eager")
    output = model(torch.tensor([[49, 3]]), decoder_input_ids=torch.tensor([[43, 2]]), output_attentions=True)
    assert (len(output.encoder_attentions), len(output.decoder_attentions), len(output.cross_attentions)) == (2, 3, 3)
    with pytest.raises(ValueError, match="the vocabulary has 0 to 43"):
        model(torch.tensor([[49, 3]]), decoder_input_ids=torch.tensor([[44, 2]]))


def layers_of(name, folder):
    """Ours and transformers' model of the same weights, the layers of each, and what they read besides the source."""
    if name == "qwen3":
        ours, theirs = pair(sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
        return (ours, theirs), (ours.model.layers, theirs.model.layers), {}
    if name == "t5":
        ours, theirs = t5_pair(folder)
        return (ours, theirs), (ours.get_encoder().layers, theirs.encoder.block), {"decoder_input_ids": target(2, 4)}
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    theirs = BertModel(BertConfig(vocab_size=VOCAB, **settings, initializer_range=0.3)).eval()
    theirs.save_pretrained(folder)
    ours = blockformer.from_official(folder)
    return (ours, theirs), (ours.layers, theirs.encoder.layer), {}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["bert", "t5"])
@torch.no_grad()
def test_a_layer_added_to_an_encoder_is_run_whatever_the_config_says(name, prepared, tmp_path):
    (ours, theirs), layers, given = layers_of(name, tmp_path)
    ids = token_ids(2, 9, vocab=VOCAB)
    before = ours(input_ids=ids, **given)[0]
    if prepared:
        ours.prepare_for_inference()
    for each in layers:
        each.append(copy.deepcopy(each[1]))
    after = ours(input_ids=ids, **given)[0]
    assert_close(after, theirs(input_ids=ids, **given)[0])
    assert not torch.allclose(before, after, atol=1e-2)


class Steers(torch.nn.Module):
    """Stands in a layer's place, as steering and calibration put it there, and has none of the layer's attributes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        output = self.layer(*args, **kwargs)
        return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "bert", "t5"])
@torch.no_grad()
def test_a_wrapper_may_stand_around_a_layer(name, prepared, tmp_path):
    models, layers, given = layers_of(name, tmp_path)
    if prepared:
        models[0].prepare_for_inference()
    given["input_ids"], mask = token_ids(2, 9, vocab=VOCAB), torch.ones(2, 9)
    mask[1, slice(5) if name == "qwen3" else slice(-5, None)] = 0
    before = models[0](**given, attention_mask=mask)[0]
    for each in layers:
        each[1] = Steers(each[1])
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0).long()} if name == "qwen3" else {}
    ours, theirs = (model(**given, **positions, attention_mask=mask)[0] for model in models)
    real = slice(None) if name == "t5" else mask.bool()
    assert_close(ours[real], theirs[real])
    assert not torch.allclose(before[real], ours[real], atol=1e-2)
    for beams in (1, 2) if name == "qwen3" else ():
        settings = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": beams, "do_sample": False}
        texts = [model.generate(given["input_ids"], **settings) for model in models]
        assert torch.equal(*texts)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "lfm2", "bloom"])
@torch.no_grad()
def test_a_decoder_reads_both_ways_where_is_causal_is_false(name, by, prepared, tmp_path):
    """The library's argument and entry of a config, which make an encoder of a decoder for a call."""
    tiny = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "qwen3":
        ours, theirs = pair(sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    elif name == "lfm2":
        theirs = Lfm2ForCausalLM(Lfm2Config(**tiny, **sizes, layer_types=["conv", "full_attention"])).eval()
    elif name == "gemma2":
        theirs = Gemma2ForCausalLM(Gemma2Config(**tiny, **sizes, head_dim=8, sliding_window=4)).eval()
    else:
        theirs = BloomForCausalLM(BloomConfig(**tiny, n_head=4)).eval()
    if name != "qwen3":
        theirs.save_pretrained(tmp_path)
        ours = blockformer.from_official(tmp_path)
    if prepared:
        ours.prepare_for_inference()
    ids, mask = token_ids(3, 9, vocab=VOCAB), torch.ones(3, 9)
    mask[1, 6:] = 0
    usual = ours(ids).logits
    theirs.config.is_causal = False  # BLOOM's class does not take the argument
    if by == "config":
        ours.config.is_causal = False
    for given in ({}, {"attention_mask": mask}):
        found = ours(ids, **given, **({"is_causal": False} if by == "argument" else {})).logits
        assert_close(found[mask.bool()], theirs(ids, **given).logits[mask.bool()])
        assert not torch.allclose(found[0], usual[0], atol=1e-2)
