"""What the libraries around a model do with it: backends, recording, casting, loading, offload, LoRA, pipelines."""

import copy
import itertools
import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from fork_server import PROGRAMS
from pairs import VOCAB, assert_close, config, left_padded, model, official_copy, pair, token_ids, train
from test_gradients import HEADS, model_and_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

import blockformer
from blockformer.model.compat import CACHE

MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MILD = {"initializer_range": 0.2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def logits_of(a_model, ids=None, mask=None):
    with torch.no_grad():
        return a_model(token_ids(2, 9) if ids is None else ids, attention_mask=mask).logits


def greedy(a_model, ids=None):
    return a_model.generate(token_ids(1, 6) if ids is None else ids, max_new_tokens=8, do_sample=False)


def reloaded(a_model, folder, **settings):
    a_model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


# What is asked for and not installed


def test_flash_attention_that_is_not_installed_is_refused_by_name(tmp_path):
    ours, asked = model(), {"attn_implementation": "flash_attention_2"}
    ours.save_pretrained(tmp_path)
    for ask in (
        lambda: ours.set_attn_implementation("flash_attention_2"),
        lambda: type(ours).from_pretrained(tmp_path, **asked),
        lambda: AutoModelForCausalLM.from_config(ours.config, **asked),
    ):
        with pytest.raises(ImportError, match=r"FlashAttention2 .*installed"):
            ask()


def test_kernels_of_the_hub_that_are_not_installed_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"pip install .*kernels"):
        reloaded(model(), tmp_path, use_kernels=True)


def test_kernels_of_the_hub_take_the_place_of_activations_only(tmp_path):
    """Norms and networks of ours have no name of theirs: what theirs read and give is not the same (docs/gpu.md)."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "hub_kernels.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"SiLU": ["SiLUActivation"], "GeLU": ["GELUActivation"]}


# Attention backends and what they record


@pytest.mark.parametrize(
    ("backend", "windows"),
    [(backend, windows) for backend in ("eager", "sdpa") for windows in ({}, MIXED)] + [("flex_attention", MIXED)],
)
def test_every_attention_backend_gives_the_logits_of_transformers(backend, windows):
    """Flex attention builds its kernel with a C++ compiler."""
    ours, theirs = pair(num_attention_heads=2, num_key_value_heads=1, **MILD, **windows)
    ids, mask = left_padded(3, 12)
    expected = logits_of(theirs, ids, mask)
    ours.set_attn_implementation(backend)
    assert ours.model.layers[0].self_attn.config._attn_implementation == backend
    assert_close(logits_of(ours, ids, mask)[mask.bool()], expected[mask.bool()])
    ours.set_attn_implementation("sdpa")
    assert_close(logits_of(ours, ids, mask)[mask.bool()], expected[mask.bool()])


def test_the_backend_can_be_chosen_at_loading(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    assert eager(token_ids(1, 4), output_attentions=True).attentions[0].shape == (1, 4, 4, 4)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_recorded_states_and_attentions(family):
    ours, theirs = pair(family, **MILD)
    for a_model in (ours, theirs):
        a_model.set_attn_implementation("eager")
    ids, mask = left_padded(2, 9)
    asked = {"attention_mask": mask, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        out, their_out = ours(ids, **asked), theirs(ids, **asked)
    assert len(out.hidden_states) == 4
    assert len(out.attentions) == 3
    real = mask.bool()
    for states, their_states in zip(out.hidden_states, their_out.hidden_states, strict=True):
        assert_close(states[real], their_states[real])
    for weights, their_weights in zip(out.attentions, their_out.attentions, strict=True):
        assert_close(weights.transpose(1, 2)[real], their_weights.transpose(1, 2)[real])
    assert out.cross_attentions is None


def test_outputs_as_a_tuple():
    ours, theirs = pair(**MILD)
    for a_model in (ours, theirs):
        a_model.set_attn_implementation("eager")
    ids = token_ids(2, 9)
    asked = {"labels": ids, "output_hidden_states": True, "output_attentions": True, "return_dict": False}
    with torch.no_grad():
        out, their_out = ours(ids, use_cache=False, **asked), theirs(ids, use_cache=False, **asked)
    assert_close(out, their_out)


@pytest.mark.parametrize(("preset", "name"), HEADS)
def test_outputs_as_a_tuple_because_the_config_says_so(preset, name):
    """As `from_pretrained(..., return_dict=False)` says it, for `torch.jit.trace`."""
    a_model, given = model_and_inputs(preset, name)
    a_model.eval()
    with torch.no_grad():
        wanted = a_model(**given, return_dict=True)
        a_model.config.return_dict = False
        out = a_model(**given)
    assert type(out) is tuple
    assert_close(out[:2], wanted.to_tuple()[:2])


def test_self_and_cross_attentions_are_recorded_apart():
    ours = model(add_cross_attention=True)
    ours.set_attn_implementation("eager")
    out = ours(token_ids(2, 5), encoder_hidden_states=torch.randn(2, 7, 64), output_attentions=True)
    assert [weights.shape for weights in out.attentions] == [(2, 4, 5, 5)] * 3
    assert [weights.shape for weights in out.cross_attentions] == [(2, 4, 5, 7)] * 3


@pytest.mark.parametrize("windows", [{}, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_sequences_packed_into_one_row_do_not_see_each_other(backend, windows):
    ours, theirs = pair(**MILD, **windows)
    for a_model in (ours, theirs):
        a_model.set_attn_implementation(backend)
    parts = [token_ids(1, length, seed=length) for length in (5, 9, 4)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        logits = ours(torch.cat(parts, dim=1), **packed).logits
        assert_close(logits, theirs(torch.cat(parts, dim=1), **packed).logits)
        assert_close(logits, torch.cat([ours(part).logits for part in parts], dim=1))


BERT = {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, **MILD}
POSITIONS = {
    "gaps": torch.arange(9) * 3,
    "backwards": torch.arange(8, -1, -1),
    "zeros": torch.zeros(9, dtype=torch.long),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_positions_that_do_not_start_again_are_those_of_one_text(positions, is_prepared, tmp_path):
    """Where transformers takes them for one: in encoders, and in decoders while a cache is made."""
    torch.manual_seed(0)
    bert = BertForMaskedLM(BertConfig(intermediate_size=256, **BERT)).eval()
    bert.save_pretrained(tmp_path)
    for ours, theirs in ((blockformer.from_official(tmp_path).eval(), bert), pair(**MILD)):
        if is_prepared:
            ours.prepare_for_inference()
        with torch.no_grad():
            expected = theirs(token_ids(2, 9), position_ids=positions[None]).logits
            assert_close(ours(token_ids(2, 9), position_ids=positions[None]).logits, expected)


def test_a_run_without_memory():
    """Tools that estimate memory run a model on tensors of `FakeTensorMode`, whose values nobody can read."""
    ours = model()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(token_ids(2, 9))
        output = ours(ids, attention_mask=torch.ones_like(ids), position_ids=ids, labels=ids)
    assert output.logits.shape == (2, 9, VOCAB)


# Number formats, saving and loading


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_cast_model_keeps_its_rotary_frequencies_in_float32(dtype):
    """Rounded to bfloat16, position 255 would turn by the angle of 256."""
    exact = model().model.rotary_emb.inv_freq.clone()
    for cast in (model().to(dtype), model().half().to(dtype), model().bfloat16().float().to(dtype)):
        assert cast.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(cast.model.rotary_emb.inv_freq, exact)
        assert logits_of(cast).dtype == dtype
        assert len(greedy(cast)[0]) == 14


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_cast_model_follows_transformers(dtype):
    ours, theirs = pair(**MILD)
    ids = token_ids(4, 64)
    half, their_half = logits_of(ours.to(dtype), ids), logits_of(theirs.to(dtype), ids)
    exact = logits_of(ours.float(), ids)
    error, their_error = (half - exact).abs().mean(), (their_half - exact).abs().mean()
    assert error <= 1.2 * their_error


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path, dtype, tied, name):
    ours = model(tie_word_embeddings=tied).to(dtype)
    again, told = reloaded(ours, tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, **{name: torch.float16})
    assert again.dtype == again.config.dtype == dtype
    assert told.dtype == torch.float16
    assert ours.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in ours.state_dict().items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(logits_of(ours), logits_of(again))


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {"position_type": "sinusoidal", "rope_parameters": None},
    ],
)
def test_what_is_not_in_the_file_is_computed_after_loading(tmp_path, positions):
    """The model is built on the meta device, where buffers have no values."""
    ours = model(**positions)
    again = reloaded(ours, tmp_path, low_cpu_mem_usage=True)
    buffers = dict(ours.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], buffer) for name, buffer in again.named_buffers())
    assert torch.equal(logits_of(ours), logits_of(again))


def test_a_model_built_on_the_meta_device_and_filled():
    with torch.device("meta"):
        empty = blockformer.BlockformerDecoderForCausalLM(config())
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    ours = model()
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    assert torch.equal(logits_of(empty.eval()), logits_of(ours))


def test_saved_in_shards(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(ours))


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("sizes", [("5GB", "100KB"), ("100KB", "5GB"), ("100KB", "200KB"), ("5GB", "5GB")])
def test_a_save_over_another_leaves_only_its_own_weights(tmp_path, sizes, variant):
    first, second = model(seed=0), model(seed=1)
    for each, size, folder in ((first, sizes[0], "over"), (second, sizes[1], "over"), (second, sizes[1], "new")):
        each.save_pretrained(tmp_path / folder, max_shard_size=size, variant=variant)
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("over", "new")]
    assert names[0] == names[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "over", variant=variant)
    assert torch.equal(logits_of(again), logits_of(second))


def test_the_body_loads_from_a_model_with_a_head_and_back(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path / "head")
    body = blockformer.BlockformerDecoderModel.from_pretrained(tmp_path / "head")
    body.save_pretrained(tmp_path / "body")
    again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "body")
    assert all(torch.equal(weight, body.state_dict()[name]) for name, weight in again.model.state_dict().items())


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda ours: pickle.loads(pickle.dumps(ours))])
def test_a_copy_is_a_model_of_its_own(twin):
    ours = model(tie_word_embeddings=True)
    before, text = logits_of(ours), greedy(ours)
    other = twin(ours)
    assert torch.equal(logits_of(other), before)
    assert torch.equal(greedy(other), text)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    assert torch.equal(logits_of(ours), before)


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_threads_share_a_model(rope_type):
    ours = model(rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0})
    inputs = [token_ids(2, length, seed=length) for length in (3, 300, 9, 400)]
    alone = [(logits_of(ours, ids), greedy(ours, ids[:1, :9])) for ids in inputs]
    start = threading.Barrier(len(inputs))

    def work(ids, expected):
        start.wait()
        return [
            torch.equal(logits_of(ours, ids), expected[0]) and torch.equal(greedy(ours, ids[:1, :9]), expected[1])
            for _ in range(3)
        ]

    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(work, inputs, alone))  # raises what a thread has raised
    assert results == [[True] * 3] * len(inputs)


# Offload


def test_layers_on_cpu_and_disk(tmp_path):
    ours = model()
    expected, text = logits_of(ours), greedy(ours)
    ours.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta
    assert not loaded.model.layers[0].mlp.up_proj.weight.is_meta
    assert torch.equal(logits_of(loaded), expected)
    assert torch.equal(greedy(loaded), text)


def test_an_automatic_map_never_splits_a_layer(tmp_path):
    ours = model(num_hidden_layers=6, tie_word_embeddings=True)
    expected, text = logits_of(ours), greedy(ours)
    ours.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": "500KB"}, offload_folder=tmp_path / "offload"
    ).eval()
    placed = loaded.hf_device_map
    assert {"cpu", "disk"} <= set(placed.values())
    assert not [name for name in placed if name.startswith("model.layers.") and name.count(".") > 2]
    assert torch.equal(logits_of(loaded), expected)
    assert torch.equal(greedy(loaded), text)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_accelerate_moves_weights_in_and_out(tmp_path, offload):
    ours = model()
    expected, text = logits_of(ours), greedy(ours)
    if offload == "cpu_offload":
        moved = cpu_offload(ours, execution_device=torch.device("cpu"))
    elif offload == "disk_offload":
        moved = disk_offload(ours, tmp_path, execution_device=torch.device("cpu"))
    else:
        places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
        moved = dispatch_model(ours, {**places, "model.rotary_emb": "cpu"}, offload_dir=tmp_path, main_device="cpu")
    assert moved.model.layers[0].mlp.up_proj.weight.is_meta
    assert torch.equal(logits_of(moved), expected)
    assert torch.equal(greedy(moved), text)


def test_the_plans_for_many_devices_name_real_modules():
    ours = model()
    modules = {name for name, _ in ours.model.named_modules()}
    for pattern in ours.config.base_model_tp_plan:
        assert {pattern.replace("*", str(layer)) for layer in range(3)} <= modules
    assert set(ours.config.base_model_pp_plan) <= modules
    assert {"lm_head"} == set(blockformer.BlockformerDecoderForCausalLM._tp_plan)
    theirs = official_copy("qwen3", ours)
    assert ours.tp_plan == theirs.tp_plan
    assert ours.pp_plan == theirs.pp_plan


# LoRA


@pytest.mark.parametrize("targets", ["all-linear", None])
def test_lora_trains_merges_and_loads(tmp_path, targets):
    peft = pytest.importorskip("peft")
    ours, ids = model(**MILD), token_ids(2, 9)
    untouched = copy.deepcopy(ours)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(ours, settings)
    expected = {"q_proj", "v_proj"}
    if targets == "all-linear":
        expected |= {"k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(adapted.peft_config["default"].target_modules) == expected

    assert sum(parameter.requires_grad for parameter in adapted.parameters()) == 3 * 2 * len(expected)
    losses = train(adapted, ids, steps=2, rate=0.05)
    assert losses[1] < losses[0]

    logits = logits_of(adapted.eval(), ids)
    assert not torch.allclose(logits, logits_of(untouched, ids))
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(untouched), tmp_path / "adapter").eval()
    assert_close(logits_of(again, ids), logits)
    text = greedy(again)
    merged = reloaded(again.merge_and_unload(), tmp_path / "merged")
    assert type(merged) is type(untouched)
    assert_close(logits_of(merged, ids), logits, tolerance=1e-4)
    assert torch.equal(greedy(merged), text)
    untouched.load_adapter(tmp_path / "adapter")
    assert_close(logits_of(untouched, ids), logits)


def test_layers_that_lora_repeats_are_those_of_transformers():
    """PEFT's `layer_replication` puts more layers into a model and raises only their number in its config."""
    peft = pytest.importorskip("peft")
    adapted = []
    for a_model in pair("llama"):
        torch.manual_seed(1)
        settings = peft.LoraConfig(init_lora_weights=False, layer_replication=[[0, 3], [1, 3]])
        adapted.append(peft.get_peft_model(a_model, settings).eval())
    assert_close(*(logits_of(a_model) for a_model in adapted))
    ours, theirs = (greedy(a_model, token_ids(2, 6)) for a_model in adapted)
    assert ours.equal(theirs)


@pytest.mark.parametrize(
    ("preset", "name", "stack", "field"),
    [
        ("qwen3", "DecoderForCausalLM", "", "num_hidden_layers"),
        ("qwen3_moe", "DecoderForCausalLM", "", "num_hidden_layers"),
        ("bert", "EncoderForMaskedLM", "", "num_hidden_layers"),
        ("t5", "EncoderDecoderForConditionalGeneration", "decoder.", "decoder_layers"),
    ],
)
def test_a_model_with_fewer_layers_saves_and_loads(tmp_path, preset, name, stack, field):
    """Layers are often taken away by hand, and their number in the config is changed."""
    a_model, inputs = model_and_inputs(preset, f"Blockformer{name}")
    a_model.eval()
    del a_model.model.get_submodule(f"{stack}layers")[-1]
    setattr(a_model.config, field, getattr(a_model.config, field) - 1)
    a_model.save_pretrained(tmp_path)
    again = type(a_model).from_pretrained(tmp_path).eval()
    assert len(again.model.get_submodule(f"{stack}layers")) == getattr(a_model.config, field)
    with torch.no_grad():
        assert again(**inputs).logits.equal(a_model(**inputs).logits)


def steer(module, args):
    return (args[0] * 1.1,)  # only the states: nothing else comes by position


def steer_by_name(module, args, named):
    return args, named | {"hidden_states": named["hidden_states"] * 1.1}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@torch.no_grad()
def test_hooks_before_layers_and_attention_get_arguments_as_in_transformers(family, prepared):
    """What a hook does not give back is lost: a mask must not be among it."""
    models, (ids, mask) = pair(family), left_padded(3, 23)
    if prepared:
        models[0].prepare_for_inference()
    for a_model in models:
        a_model.model.layers[1].register_forward_pre_hook(steer)
        a_model.model.layers[2].self_attn.register_forward_pre_hook(steer_by_name, with_kwargs=True)
    ours, theirs = (a_model(ids, attention_mask=mask).logits[mask.bool()] for a_model in models)
    assert_close(ours, theirs)
    settings = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 2, "do_sample": False}
    assert torch.equal(*(a_model.generate(ids, **settings) for a_model in models))


def test_a_hook_before_a_checkpointed_layer_may_give_back_the_states_alone():
    gradients = []
    for checkpointed in (False, True):
        a_model, inputs = model_and_inputs("qwen3", "BlockformerDecoderForCausalLM")
        inputs["attention_mask"][0, :4] = 0
        a_model.model.layers[1].register_forward_pre_hook(steer)
        if checkpointed:
            a_model.gradient_checkpointing_enable()
        a_model.train()(**inputs).loss.backward()
        gradients.append({name: weight.grad for name, weight in a_model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_a_head_keeps_the_bias_that_peft_drops(tmp_path):
    """PEFT ties a saved copy of the embeddings to a linear layer that it makes without a bias."""
    peft = pytest.importorskip("peft")
    a_model, inputs = model_and_inputs("bert", "BlockformerEncoderForMaskedLM")
    torch.nn.init.normal_(a_model.lm_head.bias)
    expected, base = a_model.eval()(**inputs).logits, copy.deepcopy(a_model)
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    adapted = peft.get_peft_model(copy.deepcopy(a_model), peft.LoraConfig(**settings)).eval()
    assert_close(adapted(**inputs).logits, expected)
    tied = peft.LoraConfig(**settings, ensure_weight_tying=True)
    adapted = peft.get_peft_model(a_model, tied).eval()
    assert_close(adapted(**inputs).logits, expected)
    adapted.train()(**inputs).loss.backward()
    torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=0.1).step()
    trained = adapted.eval()(**inputs).logits
    assert not torch.equal(trained, expected)
    adapted.save_pretrained(tmp_path)
    assert_close(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()(**inputs).logits, trained)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.lm_head.bias, base.lm_head.bias)
    assert_close(merged(**inputs).logits, trained)
    unseen = peft.get_peft_model(base, tied).merge_and_unload()
    with pytest.raises(ValueError, match=r"lm_head has lost its bias.*before merge_and_unload"):
        unseen(**inputs)


def test_a_head_of_the_callers_may_lack_the_bias(tmp_path):
    torch.manual_seed(0)
    theirs = BertForMaskedLM(BertConfig(intermediate_size=256, **BERT)).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids, losses = blockformer.from_official(tmp_path).eval(), token_ids(2, 9), []
    head = torch.nn.Linear(theirs.config.hidden_size, VOCAB, bias=False)
    for a_model in (ours, theirs):
        a_model.set_output_embeddings(copy.deepcopy(head))
        losses.append(a_model(ids, labels=ids).loss)
        losses[-1].backward()
    assert_close(*losses)
    assert_close(*(a_model.get_output_embeddings().weight.grad for a_model in (ours, theirs)))


def test_lora_gives_the_logits_of_transformers():
    peft = pytest.importorskip("peft")
    adapted = []
    for a_model in pair(**MILD):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(a_model, peft.LoraConfig(init_lora_weights=False)).eval())
    assert_close(*(logits_of(a_model) for a_model in adapted))


@pytest.mark.parametrize("method", ["LoraConfig", "IA3Config", "LNTuningConfig", "VBLoRAConfig"])
def test_peft_knows_the_default_targets_of_each_method(method):
    peft = pytest.importorskip("peft")
    extra = {"vector_length": 2, "num_vectors": 4} if method == "VBLoRAConfig" else {}
    adapted = peft.get_peft_model(model(), getattr(peft, method)(**extra))
    assert any(parameter.requires_grad for parameter in adapted.parameters())


def test_the_default_targets_are_those_of_llama_whose_names_ours_are():
    constants = pytest.importorskip("peft.utils.constants")
    config = model().config
    config.to_dict()
    tables = {name: table for name, table in vars(constants).items() if isinstance(table, dict) and "llama" in table}
    tables.pop("TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING")  # norms have names of ours: see the next test
    assert len(tables) > 5
    assert all(table[config.model_type] == table["llama"] for table in tables.values())


SIDES = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
WITH_NORMS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)),
    "bart": (BartForConditionalGeneration, BartConfig(vocab_size=VOCAB, d_model=32, init_std=0.3, **SIDES)),
}


@pytest.mark.parametrize("family", ["llama", *WITH_NORMS])
def test_norms_are_tuned_by_default_where_they_are_in_the_official_class(family, tmp_path):
    peft = pytest.importorskip("peft")
    if family in WITH_NORMS:
        torch.manual_seed(0)
        official_class, settings = WITH_NORMS[family]
        official_class(settings).save_pretrained(tmp_path)
        models = blockformer.from_official(tmp_path), official_class.from_pretrained(tmp_path)
    else:
        models = pair(family, **MILD)
    ids, counts, logits = token_ids(2, 9), [], []
    for a_model in models:
        adapted = peft.get_peft_model(a_model.eval(), peft.LNTuningConfig())
        counts.append(sum(each.numel() for each in adapted.parameters() if each.requires_grad))
        train(adapted, ids, steps=2, rate=0.05)
        logits.append(logits_of(adapted.eval(), ids))
    assert counts[0] == counts[1]
    assert_close(*logits)


@pytest.mark.parametrize("method", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_trained_prompts_in_the_cache_and_in_the_embeddings(method):
    peft = pytest.importorskip("peft")
    if CACHE == "cache" and method == "PrefixTuningConfig":
        pytest.skip("PEFT 0.21 passes prefixes by a name that the classes of transformers 5.24 ignore")
    ids, results = token_ids(2, 9), []
    for a_model in pair(**MILD):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(a_model, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4))
        loss = adapted(ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        gradients = [parameter.grad for parameter in adapted.parameters() if parameter.grad is not None]
        text = adapted.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
        results.append([loss, gradients, text])
    assert results[0][1]
    assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loaded", "prepared", "compiled"])
def test_an_activated_adapter_on_padded_rows(way):
    """It counts from the end of each row where its invocation begins, so rows have to stay rows."""
    peft = pytest.importorskip("peft")
    ids, results = token_ids(2, 60, seed=3).clamp(min=9), []
    mask = torch.ones_like(ids)
    ids[0, :25], mask[0, :25] = 0, 0
    ids[0, 40:42] = ids[1, 20:22] = torch.tensor([7, 8])
    for a_model in pair(hidden_size=256, **MILD):
        torch.manual_seed(1)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8], init_lora_weights=False, target_modules=["q_proj"]
        )
        adapted = peft.get_peft_model(a_model, settings).eval()
        if not results and way != "loaded":
            a_model.prepare_for_inference(compile=way == "compiled")
        with torch.no_grad():
            logits = adapted(input_ids=ids, attention_mask=mask).logits[mask.bool()]
            text = adapted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        results.append([logits, text])
    assert_close(*results)


def test_describing_a_config_changes_nothing_of_peft():
    constants = pytest.importorskip("peft.utils.constants")
    config = model().config
    tables = {name: value for name, value in vars(constants).items() if name.startswith("TRANSFORMERS")}
    for table in tables.values():
        table.pop(config.model_type, None)
    before = copy.deepcopy(tables)
    assert config.to_dict()
    assert config.to_diff_dict()
    assert str(config)
    assert tables == before
    model()  # enters it again
    assert config.model_type in tables["TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"]


def test_peft_knows_the_targets_whichever_is_imported_first_and_is_never_imported_by_us(processes, tmp_path):
    pytest.importorskip("peft")
    script = (
        "import sys, blockformer as b\n"
        "m = b.BlockformerDecoderForCausalLM(b.preset('qwen3', hidden_size=32, num_attention_heads=2, vocab_size=50))\n"
        "assert 'peft' not in sys.modules\n"
        "from peft import LoraConfig, get_peft_model\n"
        "print(sorted(get_peft_model(m, LoraConfig()).peft_config['default'].target_modules))"
    )
    run = processes.run(script, folder=tmp_path, elsewhere=False)
    assert run.stdout.strip() == "['q_proj', 'v_proj']", run.stderr


# Embeddings


@pytest.mark.parametrize("size", [VOCAB + 13, VOCAB - 50])
@pytest.mark.parametrize(("tied", "width"), [(False, 64), (True, 64), (True, 24)])
def test_embeddings_of_another_size(tmp_path, tied, width, size):
    ours = model(tie_word_embeddings=tied, token_embedding_size=width)
    expected = logits_of(ours, token_ids(2, 9, vocab=100))
    ours.resize_token_embeddings(size, mean_resizing=False)
    assert ours.config.vocab_size == size
    assert ours.get_input_embeddings().weight.shape == ours.get_output_embeddings().weight.shape == (size, width)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    kept = min(size, VOCAB)
    ids = token_ids(2, 9, vocab=100)
    assert_close(logits_of(ours, ids)[..., :kept], expected[..., :kept])
    ids[0, 3] = size - 1
    ours(ids, labels=ids).loss.backward()
    again = reloaded(ours, tmp_path)
    assert again.config.vocab_size == size
    assert torch.equal(greedy(again, ids), greedy(ours, ids))
    with pytest.raises(ValueError, match=f"0 to {size - 1}"):
        logits_of(ours, torch.tensor([[size]]))


def test_a_head_with_a_bias_grows_its_bias():
    ours = model(lm_head_bias=True)
    ours.resize_token_embeddings(VOCAB + 5)
    assert ours.lm_head.bias.shape == (VOCAB + 5,)
    assert logits_of(ours).shape[-1] == VOCAB + 5


# Pipelines


def test_pipeline(tiny_tokenizer):
    ours, theirs = pair(vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=0)
    prompts = ["def insort(a, x):", "class TextWrapper:\n    ", "import"]
    texts = []
    for a_model in (ours, theirs):
        write = pipeline("text-generation", model=a_model, tokenizer=tiny_tokenizer)
        texts.append(write(prompts, max_new_tokens=12, do_sample=False, batch_size=3))
    assert texts[0] == texts[1]
    assert all(text[0]["generated_text"].startswith(prompt) for text, prompt in zip(texts[0], prompts, strict=True))


def test_pipeline_from_a_folder(tmp_path, tiny_tokenizer):
    ours = model(vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=0)
    ours.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    text = pipeline("text-generation", model=str(tmp_path))("def ", max_new_tokens=8, do_sample=False)
    ids = tiny_tokenizer("def ", return_tensors="pt").input_ids
    assert text[0]["generated_text"] == "def " + tiny_tokenizer.decode(greedy(ours, ids)[0, ids.shape[1] :])


def test_a_bart_fills_masks_in_the_pipeline(tmp_path, tiny_tokenizer):
    """transformers counts BART, mBART and MVP among the masked language models."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    config = BartConfig(vocab_size=len(tokenizer), init_std=0.3, **sizes, **tokens)
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "src")
    tokenizer.save_pretrained(tmp_path / "src")
    blockformer.convert(tmp_path / "src", tmp_path / "dst", verify=False)
    text = ["def <mask>(heap, item):", "import <mask>"]
    answers = (pipeline("fill-mask", model=str(tmp_path / name))(text) for name in ("src", "dst"))
    for their, our in zip(*map(itertools.chain.from_iterable, answers), strict=True):
        assert our["sequence"] == their["sequence"]
        assert our["score"] == pytest.approx(their["score"], rel=1e-5)


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_pipelines_of_the_classifiers(task, tiny_tokenizer):
    head = {"text-classification": "Sequence", "token-classification": "Token"}[task]
    cls = getattr(blockformer, f"BlockformerDecoderFor{head}Classification")
    ours = model(cls=cls, vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=0)
    answer = pipeline(task, model=ours, tokenizer=tiny_tokenizer)("import heapq")
    assert answer
    assert all(0 <= item["score"] <= 1 for item in answer)
