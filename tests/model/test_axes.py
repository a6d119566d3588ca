"""Each axis of the core against a model of transformers that has that setting, with the same weights.

The maps here are only what the parity needs; reading official checkpoints is the work of `blockformer.conversion`.
"""

import pytest
import torch
from pairs import assert_close, token_ids
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, T5Config
from transformers.models.t5.modeling_t5 import T5Stack

from blockformer import BlockformerDecoderConfig, BlockformerDecoderForCausalLM, BlockformerDecoderModel

VOCAB, WIDTH, HEADS, LAYERS = 97, 48, 4, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}


def randomise(model, scale=0.3):
    """Every weight random, biases and norms too, so that none can be left out unseen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() or "ln_" in name
            offset = 1.0 if is_norm and name.endswith("weight") else 0.0
            parameter.copy_(offset + scale * torch.randn_like(parameter))
    return model.eval()


def load(model, weights):
    model.load_state_dict(weights)
    return model.eval()


def gpt2_weights(theirs):
    state, weights = theirs.state_dict(), {}
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = state["transformer.wte.weight"]
    weights["model.embed_positions.weight"] = state["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        weights[f"model.norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(LAYERS):
            old, new = f"transformer.h.{layer}.", f"model.layers.{layer}."
            weights[f"{new}self_attn_pre_norm.{kind}"] = state[f"{old}ln_1.{kind}"]
            weights[f"{new}mlp_pre_norm.{kind}"] = state[f"{old}ln_2.{kind}"]
            fused = state[f"{old}attn.c_attn.{kind}"].split(WIDTH, dim=-1)
            linears = dict(zip("qkv", fused, strict=True)) | {"o": state[f"{old}attn.c_proj.{kind}"]}
            for name, tensor in linears.items():
                weights[f"{new}self_attn.{name}_proj.{kind}"] = tensor.t() if kind == "weight" else tensor
            for name, source in (("up", "c_fc"), ("down", "c_proj")):
                tensor = state[f"{old}mlp.{source}.{kind}"]
                weights[f"{new}mlp.{name}_proj.{kind}"] = tensor.t() if kind == "weight" else tensor
    return weights


@pytest.mark.portable
def test_learned_positions_layer_norm_plain_mlp_and_biases_are_gpt2():
    theirs = randomise(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=64))
    )
    config = BlockformerDecoderConfig(
        **SIZES,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=64,
        norm_type="layer_norm",
        norm_eps=1e-5,
        position_type="learned",
        gated_mlp=False,
        hidden_act="gelu_new",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    ours = load(BlockformerDecoderForCausalLM(config), gpt2_weights(theirs))
    ids = token_ids(2, 20, vocab=VOCAB)
    assert_close(ours(ids).logits, theirs(ids).logits)
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **arguments), theirs.generate(ids, **arguments))
    with pytest.raises(ValueError, match="the table of learned positions has 64"):
        ours(token_ids(1, 65, vocab=VOCAB))


def bert_weights(theirs):
    state, weights = theirs.state_dict(), {}
    weights["embed_tokens.weight"] = state["embeddings.word_embeddings.weight"]
    weights["embed_positions.weight"] = state["embeddings.position_embeddings.weight"]
    # Token type 0 belongs to every token: its vector is part of each position.
    weights["embed_positions.weight"] = (
        weights["embed_positions.weight"] + state["embeddings.token_type_embeddings.weight"][0]
    )
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = state[f"embeddings.LayerNorm.{kind}"]
        for layer in range(LAYERS):
            old, new = f"encoder.layer.{layer}.", f"layers.{layer}."
            for theirs_name, ours_name, norm in (
                ("attention", "self_attn", "self_attn_post_norm"),
                ("crossattention", "cross_attn", "cross_attn_post_norm"),
            ):
                linears = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
                for name, source in linears.items():
                    weights[f"{new}{ours_name}.{name}_proj.{kind}"] = state[f"{old}{theirs_name}.{source}.{kind}"]
                weights[f"{new}{norm}.{kind}"] = state[f"{old}{theirs_name}.output.LayerNorm.{kind}"]
            weights[f"{new}mlp.up_proj.{kind}"] = state[f"{old}intermediate.dense.{kind}"]
            weights[f"{new}mlp.down_proj.{kind}"] = state[f"{old}output.dense.{kind}"]
            weights[f"{new}mlp_post_norm.{kind}"] = state[f"{old}output.LayerNorm.{kind}"]
    return weights


def bert_decoders():
    """Ours and a BERT decoder with cross-attention, with the same weights."""
    theirs = randomise(
        BertModel(
            BertConfig(
                **SIZES,
                intermediate_size=64,
                max_position_embeddings=64,
                is_decoder=True,
                add_cross_attention=True,
            ),
            add_pooling_layer=False,
        )
    )
    config = BlockformerDecoderConfig(
        **SIZES,
        intermediate_size=64,
        max_position_embeddings=64,
        norm_type="layer_norm",
        norm_placement="post",
        norm_eps=1e-12,
        position_type="learned",
        gated_mlp=False,
        hidden_act="gelu",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        add_cross_attention=True,
    )
    return load(BlockformerDecoderModel(config), bert_weights(theirs)), theirs


@pytest.mark.portable
def test_post_norm_embedding_norm_and_cross_attention_are_a_bert_decoder():
    ours, theirs = bert_decoders()
    ids, states = token_ids(2, 12, vocab=VOCAB), torch.randn(2, 9, WIDTH)
    encoder_mask = torch.ones(2, 9, dtype=torch.long)
    encoder_mask[1, 5:] = 0
    arguments = {"encoder_hidden_states": states, "encoder_attention_mask": encoder_mask}
    assert_close(ours(ids, **arguments).last_hidden_state, theirs(ids, **arguments).last_hidden_state)


def test_encoder_states_need_cross_attention():
    config = BlockformerDecoderConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = BlockformerDecoderModel(config)
    with pytest.raises(ValueError, match="set add_cross_attention=True"):
        model(token_ids(1, 3), encoder_hidden_states=torch.randn(1, 4, 32))


def t5_weights(theirs):
    state, weights = theirs.state_dict(), {}
    weights["embed_tokens.weight"] = state["embed_tokens.weight"]
    weights["norm.weight"] = state["final_layer_norm.weight"]
    weights["relative_bias.embedding.weight"] = state["block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    for layer in range(LAYERS):
        old, new = f"block.{layer}.layer.", f"layers.{layer}."
        for index, attention, ours_name, norm in (
            (0, "SelfAttention", "self_attn", "self_attn_pre_norm"),
            (1, "EncDecAttention", "cross_attn", "cross_attn_pre_norm"),
        ):
            for name in "qkvo":
                weights[f"{new}{ours_name}.{name}_proj.weight"] = state[f"{old}{index}.{attention}.{name}.weight"]
            weights[f"{new}{norm}.weight"] = state[f"{old}{index}.layer_norm.weight"]
        for name, source in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            weights[f"{new}mlp.{name}_proj.weight"] = state[f"{old}2.DenseReluDense.{source}.weight"]
        weights[f"{new}mlp_pre_norm.weight"] = state[f"{old}2.layer_norm.weight"]
    return weights


@pytest.mark.portable
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_relative_bias_unscaled_scores_and_gated_gelu_are_a_t5_decoder(backend):
    theirs = randomise(
        T5Stack(
            T5Config(
                vocab_size=VOCAB,
                d_model=WIDTH,
                d_kv=10,
                d_ff=64,
                num_layers=LAYERS,
                num_heads=HEADS,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=20,
                feed_forward_proj="gated-gelu",
                is_decoder=True,
                use_cache=True,
            )
        ),
        scale=0.15,
    )
    config = BlockformerDecoderConfig(
        **SIZES,
        head_dim=10,
        intermediate_size=64,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        position_type="relative_bias",
        attention_scale=1.0,
        hidden_act="gelu_new",
        add_cross_attention=True,
    )
    ours = load(BlockformerDecoderModel(config), t5_weights(theirs))
    ours.set_attn_implementation(backend)
    ids, states = token_ids(2, 30, vocab=VOCAB), torch.randn(2, 9, WIDTH)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:] = 0
    expected = theirs(ids, attention_mask=mask, encoder_hidden_states=states).last_hidden_state
    assert_close(ours(ids, mask, encoder_hidden_states=states).last_hidden_state, expected)
    first = ours(ids[:, :11], encoder_hidden_states=states, use_cache=True)
    rest = ours(ids[:, 11:], encoder_hidden_states=states, past_key_values=first.past_key_values, use_cache=True)
    whole = ours(ids, encoder_hidden_states=states).last_hidden_state
    assert_close(rest.last_hidden_state, whole[:, 11:])


@pytest.mark.portable
def test_scales_and_head_bias():
    """embedding_scale, logit_scale and lm_head_bias act where they say."""
    shared = {**SIZES, "num_hidden_layers": 1}
    plain = BlockformerDecoderForCausalLM(BlockformerDecoderConfig(**shared)).eval()
    scaled = BlockformerDecoderForCausalLM(
        BlockformerDecoderConfig(**shared, embedding_scale=2.0, logit_scale=0.5, lm_head_bias=True)
    ).eval()
    weights = plain.state_dict()
    bias = torch.randn(VOCAB)
    scaled.load_state_dict({**weights, "lm_head.bias": bias})
    ids = token_ids(1, 5, vocab=VOCAB)
    doubled = plain(inputs_embeds=2 * plain.model.embed_tokens(ids)).logits
    assert_close(scaled(ids).logits, 0.5 * doubled + bias)
