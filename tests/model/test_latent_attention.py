"""Latent attention: by its formula, its cache, every way of decoding, and what it refuses."""

import copy

import pytest
import torch
from pairs import LATENT, assert_close, latent_pair, left_padded, token_ids, train
from sizes import TINY
from transformers import DynamicCache, StaticCache

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderForCausalLM
from blockformer.model.axes import axes
from blockformer.model.latent_attention import LatentAttention
from blockformer.page.facts import Facts
from blockformer.summary import describe

SIZES = {**TINY, "vocab_size": 131, "head_dim": 12, "initializer_range": 0.4}
LATENTS = {**SIZES, "kv_lora_rank": 10, "v_head_dim": 6, "rope_parameters": {"partial_rotary_factor": 1 / 3}}


def model(**fields):
    torch.manual_seed(0)
    return BlockformerDecoderForCausalLM(BlockformerDecoderConfig(**{**LATENTS, **fields})).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours and transformers' model with the same weights."""
    return latent_pair(tmp_path_factory.mktemp("latent"))


def attended(layer, states):
    """The formulas of DeepSeek-V2 (2024), section 2.1, a head at a time, for one text [T, C] -> [T, C]."""

    def norm(x, part):
        return part.weight * x / (x.pow(2).mean(-1, keepdim=True) + part.eps) ** 0.5

    config, length = layer.config, len(states)
    size, rotated = config.head_dim, layer.k_rope_proj.out_features
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, rotated, 2) / rotated)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    latents = norm(states @ layer.kv_a_proj.weight.T, layer.kv_a_norm)
    shared = rotate(states @ layer.k_rope_proj.weight.T)
    sources = norm(states @ layer.q_a_proj.weight.T, layer.q_a_norm) if config.q_lora_rank else states
    outputs = []
    for head in range(config.num_attention_heads):
        query = sources @ layer.q_proj.weight[head * size : (head + 1) * size].T
        own = latents @ layer.k_proj.weight[head * (size - rotated) : (head + 1) * (size - rotated)].T
        value = latents @ layer.v_proj.weight[head * config.v_head_dim : (head + 1) * config.v_head_dim].T
        scores = rotate(query[:, :rotated]) @ shared.T + query[:, rotated:] @ own.T
        scores = (scores / size**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ value)
    return torch.cat(outputs, dim=-1) @ layer.o_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": 14}, {"v_head_dim": 20, "latent_norm_eps": 0.1}])
def test_heads_are_made_from_a_latent_vector(fields):
    ours = model(**fields, norm_eps=0.3)
    states, found = torch.randn(1, 9, 32), []
    layer = ours.model.layers[1].self_attn
    assert type(layer) is LatentAttention
    layer.register_forward_hook(
        lambda module, args, given, output: found.append((given["hidden_states"], output[0])), with_kwargs=True
    )
    ours(inputs_embeds=states)
    ((given, output),) = found
    assert layer.kv_a_norm.eps == fields.get("latent_norm_eps", 0.3)
    assert_close(output[0], attended(layer, given[0]))


@pytest.mark.parametrize("family", LATENT)
def test_the_cache_holds_what_the_cache_of_transformers_holds(tmp_path, family):
    ours, theirs = latent_pair(tmp_path, family, num_experts_per_tok=2)
    ids, caches = token_ids(2, 7), []
    with torch.no_grad():
        for each in (ours, theirs):
            caches.append(each(ids, use_cache=True).past_key_values)
    for layer, own, other in zip(ours.model.layers, *(cache.layers for cache in caches), strict=True):
        assert own.keys.shape == (2, 1, 7, 24)
        assert own.values.shape == (2, 1, 7, 8)
        assert (own.keys.numel() + own.values.numel()) // ids.numel() == layer.self_attn.cached_numbers
        if other.keys.shape[1] == 1:  # earlier releases keep keys and values of all heads
            assert_close(own.keys, other.keys)
            rotated = other.values if family == "deepseek_v3" else other.values.unflatten(-1, (-1, 2)).mT.flatten(-2)
            assert_close(own.values, rotated)


@torch.no_grad()
def test_a_text_in_parts_with_any_cache_is_the_text_at_once(pair):
    ours, _ = pair
    ids, mask = left_padded(3, 17)
    whole = ours(ids, attention_mask=mask).logits[:, 12:]
    makers = [
        lambda: None,
        lambda: DynamicCache(config=ours.config),
        lambda: StaticCache(config=ours.config, max_cache_len=20),
    ]
    for make in makers:
        cache, parts = make(), []
        for start, stop in ((0, 9), (9, 12), (12, 13), (13, 17)):
            output = ours(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        assert_close(torch.cat(parts, dim=1)[:, 12:], whole)
        if not isinstance(cache, StaticCache):
            cache.crop(-5)
            assert_close(ours(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits, whole)


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "dynamic": {"cache_implementation": "dynamic"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "groups of samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_every_way_of_decoding_writes_the_text_of_transformers(pair, way, prepared):
    ours, theirs = pair
    if prepared:
        ours = copy.deepcopy(ours).prepare_for_inference()
    ids, mask = left_padded(1 if way == "prompt lookup" else 3, 9)
    texts = []
    for each in (ours, theirs):
        torch.manual_seed(0)
        settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, **WAYS[way]}
        texts.append(each.generate(ids, attention_mask=mask, **settings))
    assert torch.equal(*texts)
    assert len(torch.unique(texts[0][:, -16:], dim=0)) >= len(ids)


@torch.no_grad()
@pytest.mark.parametrize(
    "stance", ["force_eager", pytest.param("default", id="compiled", marks=pytest.mark.exhaustive)]
)
def test_every_backend_and_padding_give_the_same(stance, pair):
    ours, theirs = pair
    ids, mask = left_padded(3, 13)
    real = mask.bool()
    expected = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[real]
    skipping = copy.deepcopy(ours).prepare_for_training()
    eager, flexible = copy.deepcopy(ours), copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    flexible.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance(stance):
        for each in (ours, skipping, eager, flexible):
            assert_close(each(ids, attention_mask=mask).logits[real], expected)
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("eager")
    outputs = [each(ids[:1], output_attentions=True).attentions for each in (eager, theirs)]
    assert_close(*outputs)


@torch.no_grad()
def test_a_masked_head_adds_nothing():
    ours = model()
    masked = copy.deepcopy(ours)
    for layer in masked.model.layers:
        layer.self_attn.o_proj.weight[:, 6:12] = 0
    mask = torch.ones(2, 4)
    mask[:, 1] = 0
    ids = token_ids(2, 8, vocab=131)
    assert_close(ours(ids, head_mask=mask).logits, masked(ids).logits)


def test_it_learns_and_checkpointing_changes_no_gradient():
    ids, gradients = token_ids(4, 12, vocab=131), []
    for checkpointing in (False, True):
        ours = model(q_lora_rank=14).train()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in ours.parameters()])
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    losses = train(model(q_lora_rank=14, initializer_range=0.1).train(), ids, steps=20, rate=0.5)
    assert losses[-1] < losses[0] / 2


def test_fresh_weights_are_drawn_and_a_saved_model_loads(tmp_path):
    ours = model(q_lora_rank=14, initializer_range=None)
    deviations = {name: weight.std().item() for name, weight in ours.named_parameters() if "_proj" in name}
    assert all(0.05 < deviation < 0.6 for deviation in deviations.values())
    ours.save_pretrained(tmp_path)
    again = BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    ids = token_ids(1, 6, vocab=131)
    assert torch.equal(again(ids).logits, ours(ids).logits)
    assert all(getattr(again.config, name) == getattr(ours.config, name) for name in axes(type(ours.config)))


REFUSED = [
    ({"kv_lora_rank": None}, "v_head_dim is set but kv_lora_rank is None: set both or neither"),
    ({"qk_norm": True}, "qk_norm=True does not work with kv_lora_rank: leave it out"),
    ({"sliding_window": 8}, "sliding_window=8 does not work"),
    ({"pruned_heads": {0: [1]}}, "pruned_heads=.* does not work"),
    ({"add_cross_attention": True}, "add_cross_attention=True does not work"),
    ({"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0 does not work"),
    ({"attention_sinks": True}, "attention_sinks=True does not work"),
    ({"clip_qkv": 3.0}, "clip_qkv=3.0 does not work"),
    ({"linear_bits": 4, "linear_group_size": -1}, "linear_bits=4 does not work|multiple of 8"),
    ({"rope_layers": [True, False]}, "rope_layers=.* does not work"),
    ({"num_key_value_heads": 2}, "num_key_value_heads=2 does not work with kv_lora_rank"),
    ({"rope_parameters": None}, "kv_lora_rank needs rotary positions that turn a part of each head"),
    ({"rope_parameters": None, "position_type": "learned"}, "kv_lora_rank needs rotary positions"),
    ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
    ({"v_head_dim": True}, "v_head_dim must be a positive integer"),
    ({"latent_norm_eps": -1.0}, "latent_norm_eps must be a positive number"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_it_does_not_go_together_with_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockformerDecoderConfig(**{**LATENTS, **fields})


@pytest.mark.parametrize("backend", ["vllm", "paged|sdpa"])
def test_a_backend_with_a_cache_of_its_own_is_refused(backend):
    ours = model()
    ours.config._attn_implementation_internal = backend
    with pytest.raises(ValueError, match="does not support a cache of latent vectors; use 'sdpa' or 'eager'"):
        ours(token_ids(1, 4, vocab=131))


def test_compiling_is_refused_and_preparing_is_not(pair):
    ours = copy.deepcopy(pair[0])
    with pytest.raises(ValueError, match="compile=True on the CPU is not supported with latent attention"):
        blockformer.prepare_for_inference(ours, compile=True)
    assert torch.equal(ours(token_ids(1, 6)).logits, pair[0](token_ids(1, 6)).logits)
    blockformer.prepare_for_inference(ours)
    assert_close(ours(token_ids(1, 6)).logits, pair[0](token_ids(1, 6)).logits)


def test_the_static_step_compiles_as_one_graph(pair):
    ours = copy.deepcopy(pair[0])
    ids = token_ids(2, 5)
    expected = ours(ids).logits
    compiled = torch.compile(ours.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        cache = StaticCache(config=ours.config, max_cache_len=8)
        ours(ids[:, :4], past_key_values=cache)
        mask = torch.ones(2, 5, dtype=torch.long)
        last = compiled(ids[:, 4:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    assert_close(last[:, 0], expected[:, 4])


def test_inspect_counts_what_is_cached_and_computed():
    """A layer keeps L + R numbers of a token; its scores are products of D channels, its sums of V."""
    config = BlockformerDecoderConfig(**{**LATENTS, "q_lora_rank": 14})
    assert describe(config).cache == {"float32": 2 * (10 + 4) * 4, "bfloat16": 2 * (10 + 4) * 2}
    facts = Facts(config, 9)
    (box,) = (box for box in facts.boxes() if box["role"] == "decoder.self_attn")
    assert box["cache"] == (10 + 4) * facts.size
    matrices = 32 * 10 + 32 * 4 + 10 * 4 * 8 + 10 * 4 * 6 + 32 * 14 + 14 * 4 * 12 + 4 * 6 * 32
    assert box["flops"] == 2 * 9 * matrices + 2 * 9 * 9 * 4 * (12 + 6)
    assert box["chips"] == ["rotary on 33%", "latent keys and values, 10", "latent queries, 14"]
