"""Position schemes, residuals and values of earlier layers from outside: each computes what a built-in model does."""

import json
import re
import threading
from pathlib import Path

import pytest
import scale_steps
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from fork_server import program
from own_blocks import LOOKED_UP, POSITIONS, RESIDUAL, SIZES, VALUES, forgotten_after, register
from pairs import assert_close, assert_gradients_close

import blockformer
from blockformer.model.axes import BLOCKS
from blockformer.model.layer import NORM_SLOTS
from blockformer.page.making import page_of

MODELS = {
    "gpt2": "BlockformerDecoderForCausalLM",
    "bert": "BlockformerEncoderForMaskedLM",
    "t5": "BlockformerEncoderDecoderForConditionalGeneration",
}
TABLE = """
from .blocks import block
from .vector_positions import LearnedPositions

@block("position_type", "my_table")
class MyTable(LearnedPositions):
    gives = "vectors"
"""
SLOPES = """
import torch
from torch import nn
from .axes import SHARED
from .blocks import block

@block("position_type", "my_slopes")
class MySlopes(nn.Module):
    gives = "biases"
    tensor_parallel_plan = {"": SHARED}

    def __init__(self, config, bidirectional):
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([2.0**-4, 2.0**-8]))

    def forward(self, places, key_length):
        distance = torch.arange(key_length, device=places.device) - places[:, None]
        return (-self.slopes[:, None, None] * distance.abs())[None]
"""
SCHEMES = {"my_table": TABLE, "my_slopes": SLOPES}
SETTINGS = [
    {"position_type": "my_table"},
    {"position_type": "p_rope"},
    {"position_type": "my_slopes"},
    {"residual": "rezero"},
    {"attention_type": "value_residual"},
    {"attention_type": "value_embeddings"},
    {"attention_type": "value_residual", "position_type": "my_slopes", "residual": "rezero"},
]
NAMES = ["vectors", "rotations", "biases", "residual", "values", "looked up", "all"]


def source(path, text):
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def schemes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    return [source(folder / f"{name}.py", text) for name, text in SCHEMES.items()]


@pytest.fixture(autouse=True)
def registered(schemes):
    with forgotten_after():
        register(POSITIONS, RESIDUAL, VALUES, LOOKED_UP, *schemes)
        yield


def model_of(name="gpt2", **settings):
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = blockformer.preset(name, **{**SIZES, "num_hidden_layers": 3, **dropouts, **settings})
    model = getattr(blockformer, MODELS[name])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def ids_of(*shape, seed=1):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def with_weights_of(model, **settings):
    """A model of other settings with the weights that both have."""
    twin = model_of(**settings)
    found = twin.load_state_dict(model.state_dict(), strict=False)
    assert not found.missing_keys
    return twin


# Each block computes its formula: a built-in model is the oracle.


def test_a_table_from_outside_is_a_learned_one():
    model = model_of(position_type="my_table")
    assert_close(model(ids_of(2, 9)).logits, with_weights_of(model, position_type="learned")(ids_of(2, 9)).logits)


def test_rotations_from_outside_rotate_as_the_usual_ones_do():
    model = model_of(position_type="p_rope", p_rope_share=1.0)
    usual = with_weights_of(model, position_type="rotary")
    assert_close(model(ids_of(2, 9)).logits, usual(ids_of(2, 9)).logits)
    part = with_weights_of(model, position_type="p_rope", p_rope_share=0.5)
    assert (part.model.rotary_emb.inv_freq == 0).sum() * 2 == len(part.model.rotary_emb.inv_freq)
    assert not torch.allclose(part(ids_of(2, 9)).logits, usual(ids_of(2, 9)).logits, rtol=1e-3)


def test_a_share_of_0_rotates_nothing():
    model = model_of(position_type="p_rope", p_rope_share=0)
    assert_close(model(ids_of(2, 9)).logits, with_weights_of(model, position_type="none")(ids_of(2, 9)).logits)


def test_a_bias_from_outside_is_added_to_the_scores_of_each_head():
    model = model_of(position_type="my_slopes")
    with torch.no_grad():
        model.model.relative_bias.slopes.copy_(torch.tensor([2.0**-4, 2.0**-8]))
    assert_close(model(ids_of(2, 9)).logits, with_weights_of(model, position_type="alibi")(ids_of(2, 9)).logits)


def alphas_of(layer):
    return [parameter for name, parameter in layer.named_parameters(recurse=False) if name.endswith("_alpha")]


def test_rezero_multiplies_what_each_sublayer_adds():
    model = model_of(residual="rezero")
    with torch.no_grad():
        for layer in model.model.layers:
            for alpha in alphas_of(layer):
                alpha.fill_(0.3)
    scaled = with_weights_of(model, residual_multiplier=0.3)
    assert_close(model(ids_of(2, 9)).logits, scaled(ids_of(2, 9)).logits)
    fresh = blockformer.BlockformerDecoderForCausalLM(model.config).eval()
    states = fresh(ids_of(2, 9), output_hidden_states=True).hidden_states
    assert torch.equal(states[0], states[2])


def test_values_are_mixed_with_those_of_the_first_layer():
    model, ids = model_of(attention_type="value_residual"), ids_of(2, 9)
    read = []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: read.append(output))
    cache = model(ids, use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        own, first = (1.0, 0.0) if index == 0 else model.model.layers[index].self_attn.value_shares
        torch.testing.assert_close(layer.values.transpose(1, 2).flatten(2), own * read[index] + first * read[0])
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.value_shares.copy_(torch.tensor([1.0, 0.0]))
    assert_close(model(ids).logits, with_weights_of(model)(ids).logits)


def test_values_are_mixed_with_those_of_a_table():
    model, ids = model_of(attention_type="value_embeddings"), ids_of(2, 9)
    table, read = model.model.layers[0].self_attn.value_table.weight, []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: read.append(output))
    cache = model(ids, use_cache=True).past_key_values
    for layer, output, kept in zip(model.model.layers, read, cache.layers, strict=True):
        own, looked_up = layer.self_attn.value_shares
        torch.testing.assert_close(kept.values.transpose(1, 2).flatten(2), own * output + looked_up * table[ids])
    with pytest.raises(ValueError, match="looked up by input_ids: give them, not inputs_embeds"):
        model(inputs_embeds=model.model.embed_tokens(ids))


# Each way to run a model gives what the plain way gives.


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_caches_padding_and_rows_of_several_sequences_change_nothing(settings):
    model, ids = model_of(**settings), ids_of(2, 9)
    wanted = model(ids).logits
    cache = model(ids[:, :5], use_cache=True).past_key_values
    assert_close(model(ids[:, 5:], past_key_values=cache).logits, wanted[:, 5:])
    for side in ((4, 0), (0, 4)):  # skipped without a cache, computed with one
        padded, mask = (torch.nn.functional.pad(each, side) for each in (ids, torch.ones_like(ids)))
        for use_cache in (False, True):
            found = model(padded, attention_mask=mask, use_cache=use_cache).logits
            assert_close(found[:, side[0] : side[0] + 9], wanted)
    positions = torch.arange(9).repeat(2)[None]
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        assert_close(model(ids.view(1, -1), position_ids=positions, use_cache=False).logits.view_as(wanted), wanted)


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_every_cache_writes_the_same_text(settings):
    model, ids = model_of(initializer_range=0.2, **settings), ids_of(2, 7)
    whole = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, use_cache=False, **whole)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = model.generate(ids, attention_mask=mask, use_cache=False, **whole)
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, **whole, **more), wanted)
        assert torch.equal(model.generate(ids, attention_mask=mask, **whole, **more), padded)
    blockformer.prepare_for_inference(model)
    assert torch.equal(model.generate(ids, **whole), wanted)
    assert torch.equal(model.generate(ids, attention_mask=mask, **whole), padded)


@pytest.mark.parametrize("name", ["bert", "t5"])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_other_topologies_come_back_and_skip_padding(tmp_path, name, settings):
    model, ids = model_of(name, **settings), ids_of(2, 9)
    more = {"decoder_input_ids": ids_of(2, 5)} if name == "t5" else {}
    wanted = model(ids, **more).logits
    padded, mask = (torch.nn.functional.pad(each, (0, 4)) for each in (ids, torch.ones_like(ids)))
    assert_close(model(padded, attention_mask=mask, **more).logits[:, : wanted.shape[1]], wanted)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids, **more).logits, wanted)


@pytest.mark.versions
def test_a_repo_with_them_loads_where_neither_the_package_nor_the_blocks_are(tmp_path, fresh):
    model, ids = model_of(initializer_range=0.2, **SETTINGS[-1]), ids_of(2, 7)
    wanted = {"logits": model(ids).logits, "ids": model.generate(ids, max_new_tokens=6, do_sample=False)}
    blockformer.export_model(model, tmp_path / "repo")
    arguments = (tmp_path / "repo", tmp_path / "again", "AutoModelForCausalLM", json.dumps({"input_ids": ids.tolist()}))
    found = json.loads(fresh(program("remote_blocks"), *arguments, folder=tmp_path))
    assert_close(torch.tensor(found["logits"]), wanted["logits"])
    assert found["ids"] == wanted["ids"].tolist()


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_gradients_reach_everything_with_and_without_checkpointing(settings):
    model, ids = model_of(**settings).train(), ids_of(2, 9)
    plain = gradients(model, ids)
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable()
    found = gradients(model, ids)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_checkpointing_that_would_lose_gradients_of_values_is_refused():
    model, ids = model_of(attention_type="value_residual").train(), ids_of(2, 9)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match=r"use_reentrant=True loses the gradients of 'values', .*: leave out"):
        gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert gradients(model, ids)
    with torch.no_grad():
        assert torch.isfinite(model(ids, labels=ids).loss)


def test_threads_do_not_read_each_other_s_values():
    model = model_of(attention_type="value_residual")
    rows = [ids_of(1, 5 + seed, seed=seed) for seed in range(4)]
    wanted, found = [model(ids).logits for ids in rows], {}

    def run(index):
        for _ in range(10):
            found.setdefault(index, []).append(model(rows[index]).logits)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(logits, wanted[index]) for index, each in found.items() for logits in each)
    assert len(found) == 4


def test_values_reach_later_layers_where_hooks_move_the_inputs_of_each():
    model, ids = model_of(attention_type="value_residual"), ids_of(2, 9)
    wanted = model(ids).logits
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert torch.equal(model(ids).logits, wanted)


def test_a_layer_from_outside_is_not_split_between_devices():
    assert model_of(residual="rezero")._no_split_modules == {"ReZeroLayer"}
    assert model_of("t5", residual="rezero")._no_split_modules == {"ReZeroLayer"}
    assert model_of()._no_split_modules == {"Layer"}


TOGETHER = [each for each in SETTINGS if not each.items() < SETTINGS[-1].items()]
"""Parts that the last row does not cover; it has a graph only if all its parts have."""


@pytest.mark.slow
@pytest.mark.parametrize("settings", TOGETHER, ids=[NAMES[SETTINGS.index(each)] for each in TOGETHER])
def test_torch_compile_traces_them_whole(settings):
    model, ids = model_of(**settings), ids_of(2, 9)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(whole(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[1:3], ids=NAMES[1:3])
def test_steps_run_uncompiled_and_write_the_same_text(settings):
    model, ids = model_of(initializer_range=0.2, **settings), ids_of(2, 9)
    whole = {"max_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, **whole)
    blockformer.prepare_for_inference(model, compile=True)
    assert torch.equal(model.generate(ids, **whole), text)
    assert not model.runtime.decoding.steps._functions


# A bias counts as a term of the scores wherever that matters.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sliding_window": 4}, "sliding_window is not supported with position_type='my_slopes'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping needs a decoder-only model without relative"),
        ({"attention_sinks": True}, "attention_sinks needs a decoder-only model without relative"),
        ({"relative_bias_per_layer": True}, "relative_bias_per_layer=True needs position_type='relative_bias'"),
        ({"rope_parameters": {"rope_theta": 500.0}}, "rope_parameters is set but position_type is 'my_slopes'"),
        ({"rope_layers": [True, False, True]}, "rope_layers must list a bool for each layer of a rotary decoder"),
    ],
)
def test_settings_that_a_bias_does_not_go_with(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_of(position_type="my_slopes", **settings)


@pytest.mark.parametrize("backend", ["flash_attention_2", "paged|sdpa", "vllm"])
def test_backends_without_terms_of_scores_refuse_a_bias(backend):
    model = model_of(position_type="my_slopes")
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match="does not support a relative position term; use 'sdpa' or 'eager'"):
        model(ids_of(2, 9))


@pytest.mark.parametrize("name", ["gemma2", "modernbert", "qwen3", "t5", "gpt_oss", "deberta-v2"])
@pytest.mark.parametrize("kind", ["my_slopes", "my_table", "p_rope"])
def test_presets_give_up_what_other_positions_have_not(name, kind):
    assert blockformer.preset(name, position_type=kind).position_type == kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_type": "p_rope", "p_rope_share": 2}, "p_rope_share must be a probability from 0 to 1, not 2"),
        ({"position_type": "p_rop"}, "Did you mean 'p_rope'?"),
        ({"residual": "rezer"}, "Did you mean 'rezero'?"),
        (
            {"residual": "rezero", "first_attention_norm": False},
            "first_attention_norm=False needs norm_placement='pre'",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_of(**settings)


def test_a_residual_from_outside_may_have_norms_anywhere():
    for placement in NORM_SLOTS:
        model, ids = model_of(residual="rezero", norm_placement=placement), ids_of(2, 9)
        with torch.no_grad():
            for layer in model.model.layers:
                for alpha in alphas_of(layer):
                    alpha.fill_(1.0)
        assert_close(model(ids).logits, with_weights_of(model, norm_placement=placement)(ids).logits)


# What `register` refuses.

HEAD = "import torch\nfrom torch import nn\nfrom .blocks import block, leave, read\n"
SCHEME = HEAD + "@block('position_type', 'mine')\nclass Mine(nn.Module):\n    gives = '{}'\n"
FROM_CONFIG = "    def __init__(self, config):\n        super().__init__()\n        self.size = config.hidden_size\n"
BIAS = "    def __init__(self, config, bidirectional):\n        super().__init__()\n"
PROBLEMS = {
    "places instead of positions": (
        SCHEME.format("vectors") + FROM_CONFIG + "    def forward(self, position_ids):\n"
        "        return torch.arange(position_ids.shape[1])[None, :, None].expand(-1, -1, self.size) / 8.0\n",
        "than without",
    ),
    "a bias of places": (
        SCHEME.format("biases") + BIAS + "    def forward(self, places, key_length):\n"
        "        return -torch.arange(key_length).float().expand(1, 2, len(places), -1) ** 0.5\n",
        "writes other text with padding than without: take positions from position_ids",
    ),
    "a shape": (
        SCHEME.format("rotations") + FROM_CONFIG + "    def forward(self, hidden_states, position_ids):\n"
        "        return hidden_states, hidden_states\n",
        "a model with position_type='mine' does not run: ",
    ),
    "parameters that processes would not add up": (
        SCHEME.format("biases") + BIAS + "        self.table = nn.Embedding(64, 2)\n"
        "    def forward(self, places, key_length):\n"
        "        distance = (places[:, None] - torch.arange(key_length)).abs()\n"
        "        return self.table(distance).permute(2, 0, 1)[None]\n",
        "other gradients of 'table': write tensor_parallel_plan = {'table': SHARED} in the class",
    ),
    "whoever comes first": (
        HEAD + "from .attention import Attention\n@block('attention_type', 'mine')\nclass Mine(Attention):\n"
        "    def before_cache(self, key, value, earlier):\n        if not hasattr(earlier, 'values'):\n"
        "            leave(earlier, 'values', value)\n            return key, value\n"
        "        return key, value + read(earlier, 'values')\n",
        "gradient checkpointing",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks_that_do_not_work_in_a_model(tmp_path, name):
    text, message = PROBLEMS[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        blockformer.register(source(tmp_path / "mine.py", text))
    assert str(error.value).startswith(str(tmp_path / "mine.py"))
    assert all("mine" not in known for known in BLOCKS.values())


# How processes share them, and what is shown.


def test_gradients_of_rotations_and_biases_are_added_where_heads_are_shared_out():
    shared = "replicated_with_grad_allreduce"
    assert model_of(position_type="my_slopes").config.base_model_tp_plan["relative_bias"] == shared
    assert "rotary_emb" not in model_of(position_type="p_rope").config.base_model_tp_plan  # it has no parameters
    assert model_of(attention_type="value_residual").config.base_model_tp_plan["layers.*.self_attn"] == shared
    plan = model_of("t5", position_type="my_slopes").config.base_model_tp_plan
    assert (plan["encoder.relative_bias"], plan["decoder.relative_bias"]) == (shared, shared)
    assert "embed_positions" not in model_of(position_type="my_table").config.base_model_tp_plan
    one_key = model_of(position_type="my_slopes", num_key_value_heads=1).config  # whole heads in each process
    assert "relative_bias" not in one_key.base_model_tp_plan


@pytest.mark.slow
def test_two_processes_that_share_them_answer_like_one(tmp_path, processes):
    source(tmp_path / "my_slopes.py", SLOPES)
    settings = {"attention_type": "value_residual", "position_type": "my_slopes", "residual": "rezero"}
    model = model_of(vocab_size=199, initializer_range=0.2, **settings)
    model.save_pretrained(tmp_path / "model-0")
    (tmp_path / "models.json").write_text('["layers"]')
    one, task = scale_steps.answers(model), "blocks_in_parallel"
    arguments = (Path(scale_steps.__file__).parent, tmp_path, json.dumps([task]), 2)
    done = processes.run(program("world"), *arguments, folder=tmp_path, elsewhere=False)
    assert done.returncode == 0, done.stderr
    assert {"model.relative_bias.slopes", "model.layers.1.self_attn.value_shares"} <= one["gradients"].keys()
    for rank in range(2):
        found = torch.load(tmp_path / f"{task}-{rank}.pt")["layers"]
        assert_close(found["logits"], one["logits"])
        assert torch.equal(found["text"], one["text"])
        assert_gradients_close(found["gradients"], one["gradients"])
        weight = "model.layers.0.self_attn.q_proj.weight"
        assert 2 * found["local_sizes"][weight] == one["gradients"][weight].numel()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"position_type": "my_table"}, ["My table", "my_table.py · MyTable"]),
        ({"position_type": "my_slopes"}, ["My slopes", "my_slopes.py · MySlopes", "my slopes"]),
        ({"position_type": "p_rope"}, ["P rope", "p_rope.py · PartialRotation", "p_rope_share"]),
        ({"residual": "rezero"}, ["Rezero"]),
        ({"attention_type": "value_residual"}, ["value residual", "value_residual.py · ValueResidual"]),
        ({"attention_type": "value_embeddings"}, ["value embeddings", "value_embeddings.py · ValueEmbeddings"]),
    ],
    ids=NAMES[:-1],
)
def test_the_page_calls_them_by_their_names(tmp_path, settings, words):
    model_of(**settings).save_pretrained(tmp_path)
    html = page_of(str(tmp_path))
    assert all(each in html for each in words)
    assert "Learned positions" not in html or "position_type" not in settings


def test_reshaping_keeps_them_and_refuses_what_has_no_place():
    model = model_of(attention_type="value_residual", position_type="my_slopes", residual="rezero")
    small = blockformer.reshape(model, layers=[0, 2])
    assert small.config.blocks == model.config.blocks
    assert torch.equal(small.model.layers[1].self_attn.value_shares, model.model.layers[2].self_attn.value_shares)
    with pytest.raises(ValueError, match=r"the new model needs a weight .*value_shares that the old one lacks"):
        blockformer.reshape(model, layers=[0, 0])
    both = blockformer.reshape(model, topology="encoder-decoder", decoder_start_token_id=0)
    layer = both.model.decoder.layers[2]
    assert layer.cross_attn_alpha == layer.self_attn_alpha == model.model.layers[2].self_attn_alpha
    assert torch.equal(both.model.encoder.relative_bias.slopes, model.model.relative_bias.slopes)
