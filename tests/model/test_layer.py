"""Layers: where norms stand, in sequence and parallel, rotations by layer type; by hand and against transformers."""

import pytest
import torch
from pairs import assert_close, left_padded, pair, token_ids
from pairs import model as small_model
from sizes import THREE_LAYERS
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import blockformer
from blockformer.model.layer import Layer, LayerInputs

VOCAB, WIDTH, HEADS, LAYERS = 97, 48, 4, 3
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}


def randomise(model, scale=0.3):
    """Every weight random, biases and norms too, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(is_norm + scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def loaded(config, weights):
    """A decoder with a head and exactly these weights."""
    model = blockformer.BlockformerDecoderForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()


def renamed(weights, names):
    """Weights with parts of their names replaced."""
    for old, new in names.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    return weights


def by_hand(layer, states, layer_inputs):
    """The layer's formula, written out for each placement."""

    def attend(states):
        return layer.self_attn(states, attention_mask=layer_inputs.masks["full_attention"], places=layer_inputs.places)[
            0
        ]

    def norm(name):
        return getattr(layer, f"{name}_norm")

    if layer.residual == "parallel":
        return states + attend(norm("self_attn_pre")(states)) + layer.mlp(norm("mlp_pre")(states))
    if layer.residual == "parallel_shared_norm":
        shared = norm("self_attn_pre")(states)
        return states + attend(shared) + layer.mlp(shared)
    for name, sublayer in (("self_attn", attend), ("mlp", layer.mlp)):
        slots = [slot for slot in ("input", "pre", "output", "post") if hasattr(layer, f"{name}_{slot}_norm")]
        if slots == ["pre"]:
            states = states + sublayer(norm(f"{name}_pre")(states))
        elif slots == ["input"]:
            states = norm(f"{name}_input")(states) + sublayer(norm(f"{name}_input")(states))
        elif slots == ["post"]:
            states = norm(f"{name}_post")(states + sublayer(states))
        elif slots == ["output"]:
            states = states + norm(f"{name}_output")(sublayer(states))
        else:
            states = states + norm(f"{name}_output")(sublayer(norm(f"{name}_pre")(states)))
    return states


@pytest.mark.portable
@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"norm_placement": "pre"}, ["self_attn_pre", "mlp_pre"]),
        ({"norm_placement": "post"}, ["self_attn_post", "mlp_post"]),
        ({"norm_placement": "output"}, ["self_attn_output", "mlp_output"]),
        (
            {"norm_placement": "pre_output"},
            ["self_attn_pre", "self_attn_output", "mlp_pre", "mlp_output"],
        ),
        ({"norm_placement": "input"}, ["self_attn_input", "mlp_input"]),
        ({"norm_placement": "input_pre"}, ["self_attn_input", "mlp_pre"]),
        ({"residual": "parallel"}, ["self_attn_pre", "mlp_pre"]),
        ({"residual": "parallel_shared_norm"}, ["self_attn_pre"]),
    ],
)
def test_a_layer_is_its_formula(fields, slots):
    config = blockformer.BlockformerDecoderConfig(
        **THREE_LAYERS, **fields, norm_type="layer_norm", position_type="none"
    )
    config._attn_implementation = "eager"
    layer = randomise(Layer(config, 0, is_causal=True, has_cross_attention=False))
    assert [name.removesuffix("_norm") for name, _ in layer.named_children() if name.endswith("_norm")] == slots
    states, mask = torch.randn(2, 7, WIDTH), torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    layer_inputs = LayerInputs({"full_attention": mask}, {}, torch.arange(7))
    assert_close(layer(states, None, mask, layer_inputs=layer_inputs), by_hand(layer, states, layer_inputs))


@pytest.mark.portable
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_norms_of_outputs_are_olmo2s(backend):
    """Without its norms over whole projections, which are another axis."""
    theirs = Olmo2ForCausalLM(Olmo2Config(**THREE_LAYERS, num_key_value_heads=2, rms_norm_eps=1e-6, pad_token_id=0))
    for layer in theirs.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    randomise(theirs)
    theirs.set_attn_implementation(backend)
    config = blockformer.BlockformerDecoderConfig(
        **THREE_LAYERS, num_key_value_heads=2, norm_placement="output", rope_parameters={"rope_theta": 10_000.0}
    )
    names = {"post_attention_layernorm": "self_attn_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
    ours = loaded(config, renamed(theirs.state_dict(), names))
    ours.set_attn_implementation(backend)
    ids = token_ids(2, 20, vocab=VOCAB)
    assert_close(ours(ids).logits, theirs(ids).logits)


def gemma3_pair():
    """Sandwich norms, q/k norm, windows and a rotation for each layer type; Gemma's norms multiply by 1 + weight."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    }
    shared = {**THREE_LAYERS, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6, "layer_types": layer_types}
    theirs = Gemma3ForCausalLM(
        Gemma3TextConfig(
            **shared,
            rope_parameters={name: dict(parameters) for name, parameters in rope.items()},
            query_pre_attn_scalar=20,
            tie_word_embeddings=False,
            pad_token_id=0,
        )
    )
    randomise(theirs)
    config = blockformer.BlockformerDecoderConfig(
        **shared,
        rope_parameters=rope,
        norm_placement="pre_output",
        qk_norm=True,
        hidden_act="gelu_pytorch_tanh",
        attention_scale=20**-0.5,
        embedding_scale=WIDTH**0.5,
    )
    names = {"post_attention_layernorm": "self_attn_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
    names |= {"input_layernorm": "self_attn_pre_norm", "pre_feedforward_layernorm": "mlp_pre_norm"}
    weights = renamed(theirs.state_dict(), names)
    weights = {name: tensor + 1 if "norm" in name else tensor for name, tensor in weights.items()}
    return loaded(config, weights), theirs


@pytest.mark.portable
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_sandwich_norms_and_rotations_by_layer_type_are_gemma3s(backend):
    ours, theirs = gemma3_pair()
    for model in (ours, theirs):
        model.set_attn_implementation(backend)
    ids = token_ids(2, 30, vocab=VOCAB)
    assert_close(ours(ids).logits, theirs(ids).logits)
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids[:, :9], **arguments), theirs.generate(ids[:, :9], **arguments))


def test_rotations_by_layer_type_survive_a_file(tmp_path):
    ours, _ = gemma3_pair()
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path).eval()
    assert again.config.rope_parameters == ours.config.rope_parameters
    ids = token_ids(1, 20, vocab=VOCAB)
    assert torch.equal(again(ids).logits, ours(ids).logits)


def neox_weights(theirs):
    """GPT-NeoX has queries, keys and values in one matrix, side by side for each head."""
    names = {"gpt_neox.embed_in": "model.embed_tokens", "gpt_neox.final_layer_norm": "model.norm"}
    names |= {"embed_out": "lm_head", "gpt_neox.layers": "model.layers", "attention.dense.": "self_attn.o_proj."}
    names |= {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
    names |= {"dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
    weights = renamed(theirs.state_dict(), names)
    for name in [name for name in weights if "query_key_value" in name]:
        layer, kind = name.split("attention.")[0], name.rpartition(".")[2]
        for part, tensor in zip("qkv", weights.pop(name).unflatten(0, (HEADS, 3, -1)).unbind(1), strict=True):
            weights[f"{layer}self_attn.{part}_proj.{kind}"] = tensor.flatten(0, 1)
    return weights


@pytest.mark.portable
@pytest.mark.parametrize("is_parallel", [True, False])
def test_parallel_sublayers_are_gpt_neoxs(is_parallel):
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **THREE_LAYERS,
            use_parallel_residual=is_parallel,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
            hidden_act="gelu",
            pad_token_id=0,
        )
    )
    randomise(theirs)
    config = blockformer.BlockformerDecoderConfig(
        **THREE_LAYERS,
        **BIASES,
        residual="parallel" if is_parallel else "sequential",
        rope_parameters=rope,
        norm_type="layer_norm",
        norm_eps=1e-5,
        gated_mlp=False,
        hidden_act="gelu",
    )
    ours, ids = loaded(config, neox_weights(theirs)), token_ids(2, 20, vocab=VOCAB)
    assert_close(ours(ids).logits, theirs(ids).logits)
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **arguments), theirs.generate(ids, **arguments))


@pytest.mark.portable
def test_parallel_sublayers_behind_one_norm_are_phis():
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    theirs = PhiForCausalLM(
        PhiConfig(
            **THREE_LAYERS,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
            hidden_act="gelu_new",
            pad_token_id=0,
        )
    )
    randomise(theirs)
    config = blockformer.BlockformerDecoderConfig(
        **THREE_LAYERS,
        **BIASES,
        residual="parallel_shared_norm",
        rope_parameters=rope,
        norm_type="layer_norm",
        norm_eps=1e-5,
        gated_mlp=False,
        hidden_act="gelu_new",
        lm_head_bias=True,
    )
    names = {"input_layernorm": "self_attn_pre_norm", "self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj"}
    names |= {"mlp.fc2": "mlp.down_proj", "final_layernorm": "norm"}
    ours, ids = loaded(config, renamed(theirs.state_dict(), names)), token_ids(2, 20, vocab=VOCAB)
    assert_close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_user_may_run_the_layers_one_by_one(family, prepared):
    """As programs do that hold one layer at a time, leave early or look between, with transformers' names."""
    models = pair(family)
    if prepared:
        models[0].prepare_for_inference()
    ids, mask = left_padded(3, 9)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    seen = torch.ones(9, 9).tril().bool() & mask[:, None, None].bool()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    def run(model, ids, positions, bias=None, cache=None):
        stack, given = model.model, {"position_ids": positions, "attention_mask": bias, "past_key_values": cache}
        states = stack.embed_tokens(ids)
        given |= {"position_embeddings": stack.rotary_emb(states, positions), "use_cache": cache is not None}
        for layer in stack.layers:
            states = layer(states, **given)
        return model.lm_head(stack.norm(states))

    ours, theirs = (run(model, ids, positions, bias)[mask.bool()] for model in models)
    assert_close(ours, theirs)
    assert_close(ours, models[0](ids, attention_mask=mask).logits[mask.bool()])
    caches = [DynamicCache(), DynamicCache()]
    for start, end in ((0, 6), (6, 7), (7, 9)):
        parts = (ids[:1, start:end], torch.arange(start, end)[None])
        assert_close(*(run(model, *parts, cache=cache) for model, cache in zip(models, caches, strict=True)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_what_a_layer_reads_may_come_as_plain_tuples(family):
    """As llm-compressor and AutoRound pass it on, which move tensors in tuples from device to device."""
    ours, theirs = pair(family)

    def moved(value):
        if isinstance(value, tuple):
            return tuple(moved(each) for each in value)
        return {name: moved(each) for name, each in value.items()} if isinstance(value, dict) else value

    for layer in ours.model.layers:
        layer.register_forward_pre_hook(lambda _, args, named: (args, moved(named)), with_kwargs=True)
    ids, mask = left_padded(3, 9)
    found, wanted = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs))
    assert_close(found, wanted)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2", "modernbert-decoder"])
@torch.no_grad()
def test_a_layer_can_be_repeated_by_what_quantizers_keep_of_its_call(family):
    """Intel's GPTQ keeps the tensors and `position_embeddings`, and repeats each layer by them while it rounds."""
    ours, calls = small_model(family), []

    def keep(layer, args, given, output):
        given = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) or k == "position_embeddings"}
        calls.append((layer, args, given, output))

    for layer in ours.base_model.layers:
        layer.register_forward_hook(keep, with_kwargs=True)
    ids, mask = left_padded(3, 9)
    ours(ids, attention_mask=mask, use_cache=False)
    for layer, args, given, output in list(calls):
        assert_close(layer(*args, **given), output)


@pytest.mark.parametrize("residual", ["parallel", "parallel_shared_norm"])
def test_gradient_checkpointing_changes_no_gradient_of_parallel_sublayers(residual):
    ids, gradients = token_ids(2, 12, vocab=VOCAB), []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = blockformer.BlockformerDecoderForCausalLM(
            blockformer.BlockformerDecoderConfig(**THREE_LAYERS, residual=residual, initializer_range=0.3)
        ).train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("placement", ["post", "output", "pre_output"])
def test_parallel_sublayers_have_their_norms_before_them(placement):
    with pytest.raises(ValueError, match="set norm_placement='pre' or residual='sequential'"):
        blockformer.BlockformerDecoderConfig(residual="parallel", norm_placement=placement)


def test_parallel_sublayers_refuse_cross_attention():
    for config_class, fields in (
        (blockformer.BlockformerDecoderConfig, {"add_cross_attention": True}),
        (blockformer.BlockformerEncoderDecoderConfig, {}),
    ):
        with pytest.raises(ValueError, match="not supported with cross-attention"):
            config_class(residual="parallel", **fields)
