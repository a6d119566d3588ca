"""Layer types from outside: a state of an author's own, an attention of some layers, and layers that keep nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import scale_steps
import torch
from fork_server import program
from own_blocks import RECURRENCE, SIZES, forgotten_after, register
from pairs import assert_close, assert_gradients_close
from torch.nn.functional import pad, silu
from transformers import DynamicCache

import blockformer
from blockformer.cli.entry import main
from blockformer.model.axes import BLOCKS
from blockformer.page.making import page_of
from blockformer.pictures import anatomy
from blockformer.publishing.model_card import format_size
from blockformer.summary import describe, state_bytes

OWN, FULL = "gated_recurrence", "full_attention"
MIXED = [OWN, FULL, OWN]
HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom .blocks import block\n"
STATES = f"{HEAD}from .states import StateLayer\n"
CUMULATED = f"""{STATES}
@block("layer_types", "means")
class Means(StateLayer):
    knows_sequences = False

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx)
        self.state_shape = (config.hidden_size + 1,)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def mix(self, hidden_states, is_token, sequences, held):
        ones = hidden_states.new_ones(*hidden_states.shape[:2], 1) if is_token is None else is_token
        sums = torch.cat((hidden_states, ones), -1).cumsum(1) + self.state_in(held, hidden_states)[:, None]
        self.keep(held, sums[:, -1])
        means = sums[..., :-1] / sums[..., -1:].clamp(min=1)
        return self.q_proj(means.to(hidden_states.dtype))
"""
MIXER = f"""{STATES}
@block("layer_types", "mixer")
class Mixer(StateLayer):
    reads_whole_text, knows_sequences = True, False

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx)
        self.shares = nn.Parameter(torch.randn(16) / 4)

    def mix(self, hidden_states, is_token, sequences, held):
        length = hidden_states.shape[1]
        back = torch.arange(length)[:, None] - torch.arange(length)
        return (self.shares[back.clamp(0, 15)] * ((0 <= back) & (back < 16))) @ hidden_states
"""
ALONE = f"""{STATES}
@block("layer_types", "by_itself")
class ByItself(StateLayer):
    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx)
        self.map = nn.Linear(config.hidden_size, config.hidden_size)

    def mix(self, hidden_states, is_token, sequences, held):
        return self.map(hidden_states).tanh()
"""
GATED = f"""{HEAD}from .attention import Attention
@block("layer_types", "gated")
class Gated(Attention):
    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx, is_causal)
        self.own_gate = nn.Linear(config.hidden_size, self.o_proj.in_features, bias=False)

    def before_output(self, output, hidden_states):
        return output * self.own_gate(hidden_states).sigmoid()
"""
CONVOLVED = f"""{STATES}
@block("layer_types", "smoothed")
class Smoothed(StateLayer):
    is_stateful = False

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx, window=3)
        self.conv1d = nn.Conv1d(config.hidden_size, config.hidden_size, 3, groups=config.hidden_size, bias=False)

    def mix(self, hidden_states, is_token, sequences, held):
        return self.convolved(hidden_states, self.conv1d.weight, sequences, held).to(hidden_states.dtype)
"""
SOURCES = {"means": CUMULATED, "mixer": MIXER, "by_itself": ALONE, "gated": GATED, "smoothed": CONVOLVED}
KINDS = [OWN, "means", "by_itself", "gated", "smoothed"]
GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}


def source(path, text):
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return [RECURRENCE, *(source(folder / f"my_{name}.py", text) for name, text in SOURCES.items())]


@pytest.fixture(autouse=True)
def registered(files):
    with forgotten_after():
        register(*files)
        yield


def config_of(kind=OWN, **more):
    settings = {**SIZES, "num_hidden_layers": 3, "layer_types": [kind, FULL, kind], "initializer_range": 0.2}
    return blockformer.BlockformerDecoderConfig(**{**settings, **more})


def model_of(kind=OWN, **more):
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(config_of(kind, **more)).eval()


def ids_of(*shape, seed=1):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def padded_ids():
    ids, mask = ids_of(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def test_the_example_computes_its_formula():
    model, states = model_of(recurrence_floor=0.25), torch.randn(2, 6, 32)
    layer = model.model.layers[0].self_attn
    kept = 0.25 + 0.75 * layer.decay_proj(states).sigmoid()
    state, outputs = torch.zeros(2, 32), []
    for place in range(6):
        state = kept[:, place] * state + (1 - kept[:, place]) * layer.value_proj(states[:, place])
        outputs.append(state * silu(layer.gate_proj(states[:, place])))
    assert_close(layer(states)[0], layer.out_proj(torch.stack(outputs, dim=1)))


@torch.no_grad()
@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_same_with_a_cache_and_without(kind, prepares):
    model, (ids, mask) = model_of(kind), padded_ids()
    ways = ({}, {"attention_mask": mask}, {"num_beams": 3}, {"num_beams": 3, "attention_mask": mask})
    wanted = [model.generate(ids, use_cache=False, **way, **GREEDY) for way in ways]
    if prepares:
        blockformer.prepare_for_inference(model)
    for way, text in zip(ways, wanted, strict=True):
        assert torch.equal(model.generate(ids, **way, **GREEDY), text), way


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_in_any_parts_and_behind_padding(kind):
    model, ids = model_of(kind), ids_of(2, 9)
    wanted = model(ids).logits
    for parts in ((5, 4), (4, 1, 3, 1), (1, 8)):
        cache, found = None, []
        for part in ids.split(parts, dim=1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
        assert_close(torch.cat(found, dim=1), wanted)
    behind, mask = (pad(each, (3, 0)) for each in (ids, torch.ones_like(ids)))
    assert_close(model(behind, attention_mask=mask).logits[:, 3:], wanted)


@torch.no_grad()
def test_texts_that_share_a_row_are_as_each_by_itself_or_refused():
    ids, positions = ids_of(2, 6), torch.arange(6).repeat(2)[None]
    for kind in KINDS:
        model = model_of(kind)
        given = {"position_ids": positions, "use_cache": False}
        if kind != "means":
            assert_close(model(ids.view(1, -1), **given).logits.view(2, 6, -1), model(ids).logits)
            continue
        with pytest.raises(ValueError, match="position_ids start again in a row, and layers of 'means' cannot tell"):
            model(ids.view(1, -1), **given)
        assert_close(model(ids, position_ids=positions[:, :6].expand(2, 6)).logits, model(ids).logits)


@pytest.mark.parametrize("kind", [*KINDS, "mixer"])
def test_everything_learns_the_same_with_and_without_checkpointing(kind):
    model, ids, found = model_of(kind).train(), ids_of(2, 9), []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append({name: each.grad.clone() for name, each in model.named_parameters()})
    assert all(gradient.abs().sum() > 0 for gradient in found[0].values())
    assert_gradients_close(found[1], found[0])


@torch.no_grad()
def test_layers_that_keep_nothing_need_the_whole_text():
    model, ids = model_of("mixer"), ids_of(2, 6)
    text = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(text[:, 6], model(ids).logits[:, -1].argmax(-1))  # a prompt alone may make a cache
    with pytest.raises(ValueError, match=r"layers of 'mixer' keep nothing .* pass use_cache=False, also to generate"):
        model.generate(ids, **GREEDY)
    assert state_bytes(model, 4) == 0


@torch.no_grad()
def test_what_no_state_can_do_is_refused():
    model, ids = model_of(), ids_of(1, 6)
    for draft in ({"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(ids, **draft, **GREEDY)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 1 rows, the input has 2"):
        model(ids_of(2, 3), past_key_values=cache)
    other = model_of("means")(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"a state of sizes \[0, 1, 33\] for layer 0, whose sizes are \[0, 1, 32\]"):
        model(ids, past_key_values=other)
    with pytest.raises(ValueError, match="head_mask is not supported with layer_types of 'gated_recurrence'"):
        model(ids, head_mask=torch.ones(3, 2))


@torch.no_grad()
def test_an_own_convolution_takes_drafts():
    model, ids = model_of("smoothed"), ids_of(1, 8)
    drafts = {"prompt_lookup_num_tokens": 2, **GREEDY}
    if hasattr(DynamicCache, "activate_past_recording"):
        assert torch.equal(model.generate(ids, **drafts), model.generate(ids, **GREEDY))
    else:  # of a release that cannot crop a convolution
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(ids, **drafts)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sliding_window": 4}, "sliding_window is set but layer_types has no 'sliding_attention'"),
        ({"layer_types": [OWN] * 3}, "add a layer of 'full_attention', whose keys count a text's tokens"),
        ({"layer_types": [OWN, FULL, "conv"]}, "and no other type"),
        ({"bidirectional": True}, "not supported with bidirectional=True"),
        ({"position_type": "alibi"}, "use 'rotary', 'learned', 'sinusoidal' or 'none'"),
        ({"recurrence_floor": 2}, "recurrence_floor must be a probability from 0 to 1, not 2"),
        ({"layer_types": [OWN, FULL, "gated_recurence"]}, "Did you mean 'gated_recurrence'?"),
        (
            {"layer_types": ["gated", FULL, FULL], "bidirectional": True},
            "needs a decoder that reads from left to right",
        ),
        ({"layer_types": ["gated", FULL, FULL], "pruned_heads": {0: [1]}}, "leave pruned_heads out"),
        ({"layer_types": ["gated", FULL, FULL], "add_cross_attention": True}, "leave add_cross_attention out"),
    ],
)
def test_configs_that_cannot_be(more, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(**more)


def test_only_decoders_have_them():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    for kind, message in ((OWN, "which needs a decoder"), ("gated", "needs a decoder that reads from left to right")):
        with pytest.raises(ValueError, match=message):
            blockformer.BlockformerEncoderConfig(**sizes, layer_types=[kind, FULL])
        with pytest.raises(ValueError, match=message):
            blockformer.BlockformerEncoderDecoderConfig(**sizes, layer_types=[kind, FULL], decoder_start_token_id=0)


@torch.no_grad()
def test_an_attention_of_some_layers_next_to_windows():
    model = model_of("gated", layer_types=["gated", "sliding_attention", FULL], sliding_window=4)
    ids, mask = padded_ids()
    assert [type(each).__name__ for each in model(ids, use_cache=True).past_key_values.layers] == [
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicLayer",
    ]
    wanted = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), wanted)
    model.model.layers[0].self_attn.own_gate.weight.zero_()
    model.model.layers[0].self_attn.o_proj.weight.mul_(2)
    usual = model_of("gated", layer_types=[FULL, "sliding_attention", FULL], sliding_window=4)
    usual.load_state_dict({name: each for name, each in model.state_dict().items() if "own_gate" not in name})
    assert_close(model(ids).logits[1], blockless_logits(usual, ids)[1])


def blockless_logits(model, ids):
    """Logits of a model whose weights were set to match, with an output that a gate would have halved."""
    model.model.layers[0].self_attn.o_proj.weight.mul_(0.5)
    return model(ids).logits


@torch.no_grad()
def test_states_stay_in_float32_and_are_as_large_as_they_say():
    model, ids = model_of().bfloat16(), ids_of(2, 5)
    layers = model(ids, use_cache=True).past_key_values.layers
    for layer, held in zip(model.model.layers, layers, strict=True):
        if layer.layer_type == OWN:
            states = [getattr(held, name) for name in ("conv_states", "recurrent_states")]
            states = [each[0] if isinstance(each, dict) else each for each in states]
            assert states[1].dtype is torch.float32
            assert sum(each.nbytes for each in states) == 2 * layer.self_attn.state_bytes(2)


@pytest.mark.versions
@pytest.mark.parametrize("kind", KINDS)
def test_a_repo_with_them_loads_where_neither_the_package_nor_the_file_is(tmp_path, fresh, kind):
    model, ids = model_of(kind), ids_of(2, 7)
    with torch.no_grad():
        wanted = {"logits": model(ids).logits, "ids": model.generate(ids, max_new_tokens=6, do_sample=False)}
    blockformer.export_model(model, tmp_path / "repo")
    names = {path.name for path in (tmp_path / "repo").iterdir()}
    assert ("states.py" in names) is (kind != "gated")
    assert "delta_rule.py" not in names
    arguments = (tmp_path / "repo", tmp_path / "again", "AutoModelForCausalLM", json.dumps({"input_ids": ids.tolist()}))
    found = json.loads(fresh(program("remote_blocks"), *arguments, folder=tmp_path))
    assert_close(torch.tensor(found["logits"]), wanted["logits"])
    assert found["ids"] == wanted["ids"].tolist()


def test_page_card_inspect_verify_and_doctor_know_the_state(tmp_path, capsys):
    model = model_of()
    assert state_bytes(model, 4) == state_bytes(model, 2) == 2 * 32 * 4
    blockformer.export_model(model, tmp_path / "repo")
    card = (tmp_path / "repo/README.md").read_text()
    assert f"Layers with a state keep {format_size(256)} in float32" in card
    assert "`gated_recurrence.py` is its author's" in card
    assert describe(model.config).state == {"float32": 256, "bfloat16": 256}
    html = page_of(str(tmp_path / "repo"))
    for words in ("a state of 32", "gated recurrence", "gated_recurrence.py", "recurrence_floor", "state for a text"):
        assert words in html
    titles = [kind.title for kind in anatomy(model).stacks[0].kinds]
    assert titles[0].startswith("gated recurrence")
    for command in (["verify"], ["inspect"], ["doctor"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, str(tmp_path / "repo")])
        assert not ended.value.code
    said = capsys.readouterr().out
    assert "gated_recurrence.py: of the repo's author" in said
    assert "state in float32: 256 bytes per text of any length" in said
    assert "healthy: names, shapes and settings match" in said


def test_processes_share_attention_only_where_names_cannot_meet():
    plans = {kind: config_of(kind).base_model_tp_plan for kind in (OWN, "gated")}
    plans["conv"] = config_of("conv", layer_types=["conv", FULL, "conv"]).base_model_tp_plan
    has_attention = {kind: "layers.*.self_attn.q_proj" in plan for kind, plan in plans.items()}
    assert has_attention == {OWN: False, "gated": False, "conv": True}
    assert all("layers.*.mlp.up_proj" in plan for plan in plans.values())


@pytest.mark.slow
def test_two_processes_answer_like_one(tmp_path, processes, files):
    for file in files:
        shutil.copyfile(file, tmp_path / file.name)
    models = {kind: model_of(kind, vocab_size=199) for kind in (OWN, "means", "gated")}
    for number, model in enumerate(models.values()):
        model.save_pretrained(tmp_path / f"model-{number}")
    (tmp_path / "models.json").write_text(json.dumps([*models]))
    arguments = (Path(scale_steps.__file__).parent, tmp_path, '["blocks_in_parallel"]', 2)
    done = processes.run(program("world"), *arguments, folder=tmp_path, elsewhere=False)
    assert done.returncode == 0, done.stderr
    for kind, model in models.items():
        one = scale_steps.answers(model)
        for rank in range(2):
            found = torch.load(tmp_path / f"blocks_in_parallel-{rank}.pt")[kind]
            assert_close(found["logits"], one["logits"])
            assert torch.equal(found["text"], one["text"])
            assert_gradients_close(found["gradients"], one["gradients"])


def test_mup_takes_fields_of_sizes_for_widths(tmp_path):
    field = 'own_size=axis(8, "a positive integer", "size", "inner size")'
    text = ALONE.replace('"by_itself")', f'"sized", {field})').replace(STATES, f"{STATES}from .axes import axis\n")
    blockformer.register(source(tmp_path / "sized.py", text))
    base = config_of("sized")
    model_class = blockformer.BlockformerDecoderForCausalLM
    assert blockformer.mup_model(model_class, config_of("sized", own_size=16), base).config.own_size == 16
    with pytest.raises(ValueError, match="may only differ in widths, and they differ in recurrence_floor"):
        blockformer.mup_model(model_class, config_of(recurrence_floor=0.5), config_of())


def test_mup_takes_models_with_them():
    base, wide = config_of(), config_of(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    model = blockformer.mup_model(blockformer.BlockformerDecoderForCausalLM, wide, base)
    assert blockformer.adamw(model, learning_rate=1e-3, weight_decay=0.1, base=base)
    narrow = blockformer.mup_model(blockformer.BlockformerDecoderForCausalLM, base, base)
    assert narrow.model.layers[0].self_attn.state_shape == (32,)


def test_presets_and_their_rotation_take_them():
    for name in ("qwen3", "gemma3_text", "lfm2", "qwen3_5_text"):
        config = blockformer.preset(name, **SIZES, layer_types=[OWN, FULL], sliding_window=None)
        assert config.layer_types == [OWN, FULL]
        assert config.sliding_window is None


def test_reshaping_chooses_among_them():
    model = model_of()
    small = blockformer.reshape(model, layers=[0, 1])
    assert small.config.layer_types == [OWN, FULL]
    assert small.config.blocks == model.config.blocks
    with pytest.raises(ValueError, match="add a layer of 'full_attention'"):
        blockformer.reshape(model, layers=[0, 2])


@pytest.mark.slow
@torch.no_grad()
def test_a_step_is_left_uncompiled():
    model, ids = model_of(), ids_of(2, 9)
    text = model.generate(ids, **GREEDY)
    blockformer.prepare_for_inference(model, compile=True)
    assert torch.equal(model.generate(ids, **GREEDY), text)
    assert not model.runtime.decoding.steps._functions
    assert "GatedRecurrence" in str(blockformer.explain(model))


# What `register` refuses.

MINE = f"{STATES}\n@block('layer_types', 'mine')\nclass Mine(StateLayer):\n"
INIT = "    def __init__(self, config, layer_idx, is_causal):\n        super().__init__(config, layer_idx)\n"
MIX = "    def mix(self, hidden_states, is_token, sequences, held):\n"
SUM = "        sums = hidden_states.cumsum(1) + self.state_in(held, hidden_states)[:, None]\n"
SHAPE = "        self.state_shape = (config.hidden_size,)\n"
PROBLEMS = {
    "another base": (
        f"{HEAD}\n@block('layer_types', 'mine')\nclass Mine(nn.Module): ...\n",
        "Mine is neither a StateLayer nor an Attention: from .states import StateLayer, and extend it",
    ),
    "a name of ours": (MINE.replace("'mine'", "'conv'") + INIT, "layer_types='conv' is one of Blockformer's"),
    "a name of the library": (
        MINE.replace("'mine'", "'chunked_attention'") + INIT,
        "layer_types='chunked_attention' is another layer in transformers: give your block another name",
    ),
    "a name that the library replaces": (MINE.replace("'mine'", "'mamba'") + INIT, "is another layer in transformers"),
    "a name of attention": (MINE.replace("'mine'", "'full_attention'") + INIT, "is one of Blockformer's"),
    "nothing that mixes": (MINE + INIT, "does not run: NotImplementedError"),
    "nothing kept": (
        MINE + INIT + MIX + "        return hidden_states.cumsum(1)\n",
        "or write reads_whole_text = True",
    ),
    "a state on the module": (
        f"{MINE}    knows_sequences = False\n{INIT}        self.last = 0\n{MIX}"
        "        past = self.last if held is not None and hidden_states.shape[1] < 4 else 0\n"
        "        sums = hidden_states.cumsum(1) + (past if isinstance(past, int) else past[:, None])\n"
        "        self.last = sums[:, -1].detach()\n        return sums\n",
        "writes other text where beams or calls take turns than without a cache: begin with state_in",
    ),
    "another size": (
        f"{MINE}{INIT}{SHAPE}{MIX}{SUM}        self.keep(held, sums[:, -1, :3])\n        return sums\n",
        "keep got a state of [2, 3], but state_shape is [32]: set self.state_shape to its sizes without the batch",
    ),
    "padding that counts": (
        f"{MINE}    knows_sequences = False\n{INIT}{SHAPE}{MIX}"
        f"        hidden_states = hidden_states + 1\n{SUM}        self.keep(held, sums[:, -1])\n        return sums\n",
        "writes other text with padding than without: where is_token is 0, leave the state as it was",
    ),
    "texts that are not told apart": (
        f"{MINE}{INIT}{SHAPE}{MIX}{SUM}        self.keep(held, sums[:, -1])\n        return sums\n",
        "begin anew where sequences changes, or refuse such rows by knows_sequences = False in the class",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_layers_that_do_not_work_in_a_model(tmp_path, name):
    text, message = PROBLEMS[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        blockformer.register(source(tmp_path / "mine.py", text))
    assert str(error.value).startswith(str(tmp_path / "mine.py"))
    assert "mine" not in BLOCKS["layer_types"]
    assert BLOCKS["layer_types"]["conv"].cls.__name__ == "ShortConvolution"


def test_a_file_may_hold_a_norm_and_a_layer_type(tmp_path):
    norm = "@block('norm_type', 'plain_scale')\nclass Scale(nn.Module):\n    def __init__(self, config, size):\n"
    norm += "        super().__init__()\n\n    def forward(self, hidden_states):\n        return hidden_states / 2\n"
    added = blockformer.register(source(tmp_path / "both.py", ALONE.replace("by_itself", "alone") + "\n\n" + norm))
    assert added == {"layer_types": ["alone"], "norm_type": ["plain_scale"]}
    config = config_of(layer_types=[FULL] * 3, norm_type="plain_scale")
    assert config.blocks.keys() == {"both.py", "states.py"}  # the file imports it
