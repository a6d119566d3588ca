"""An experiment's file: what it means, all that is wrong with it at once, and configs made equal."""

import pytest

import blockformer
from blockformer.lab.experiment import LabError
from blockformer.lab.experiment_file import read_experiment
from blockformer.lab.sizes import TOLERANCE, measure

from .experiments import write_experiment

# A value of each axis that changes the model.
VALUES = {
    "norm_placement": ["post", "output", "pre_output"],
    "norm_type": ["layer_norm"],
    "position_type": ["learned", "sinusoidal", "relative_bias", "relative_key", "alibi", "none"],
    "gated_mlp": [False],
    "qk_norm": [False, "projection"],
    "num_key_value_heads": [2],
    "residual": ["parallel", "parallel_shared_norm"],
    "tie_word_embeddings": [False],
    "attention_bias": [True],
    "mlp_bias": [True],
    "vocab_size": [350],
    "num_hidden_layers": [3],
    "sliding_window": [4],
    "attention_sinks": [True],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("equal", ["parameters", "flops"])
def test_each_value_of_each_axis_is_as_large_as_the_base(tmp_path, equal):
    path = write_experiment(
        tmp_path, axes=VALUES, configs={"sparse": EXPERTS}, equal=equal, base={"intermediate_size": 192}, seeds=[0]
    )
    runs = read_experiment(path).runs()
    assert len(runs) == 2 + sum(map(len, VALUES.values()))
    sizes = {run.group: {"parameters": run.parameters, "flops": run.flops_per_token}[equal] for run in runs}
    far = {name: size / sizes["base"] - 1 for name, size in sizes.items()}
    assert max(map(abs, far.values())) <= TOLERANCE, far
    for run in runs:  # what is counted without memory is what the model has
        assert blockformer.BlockformerDecoderForCausalLM(run.config).num_parameters() == run.parameters
    widths = {run.group: run.config.intermediate_size for run in runs}
    assert widths["base"] == 192
    assert widths["gated_mlp=false"] == 288
    assert sum(width != 192 for width in widths.values()) >= 5


def test_flops_are_those_of_the_matrix_products():
    config = blockformer.preset(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    scores = 2 * 32 * 10  # queries on keys, and the weighted values, over 10 tokens
    assert measure(config, 10).flops == 3 * 2 * (2 * (layer + scores) + 64 * 32)
    assert config._attn_implementation != "eager"  # counting leaves the config as it was


def test_a_value_of_the_base_is_the_base_and_settings_that_do_not_fit_beside_others_go(tmp_path):
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 500}, "residual": "parallel"}
    axes = {"position_type": ["rotary", "none"], "norm_placement": ["pre", "post"]}
    experiment = read_experiment(write_experiment(tmp_path, base=base, axes=axes))
    assert [variant.name for variant in experiment.variants] == ["base", "position_type=none", "norm_placement=post"]
    configs = {run.group: run.config for run in experiment.runs()}
    assert configs["base"].rope_parameters["rope_theta"] == 500
    assert configs["position_type=none"].rope_parameters is None
    assert configs["norm_placement=post"].residual == "sequential"


def test_numbers_are_read_as_people_write_them(tmp_path):
    path = write_experiment(tmp_path)
    text = path.read_text().replace("tokens: 640", "tokens: 2e3").replace("learning_rate: 0.003", "learning_rate: 3e-3")
    path.write_text(text)
    experiment = read_experiment(path)
    assert experiment.budget == ("tokens", 2000.0)
    assert experiment.training["learning_rate"] == 0.003


@pytest.mark.parametrize(
    ("budget", "steps"),
    [({"tokens": 640}, 10), ({"tokens_per_parameter": 0.1}, None), ({"flops": 1e9}, None), ({"minutes": 2}, 0)],
)
def test_a_budget_is_so_many_steps(tmp_path, budget, steps):
    experiment = read_experiment(write_experiment(tmp_path, budget=budget))
    run = experiment.runs()[0]
    if steps is None:
        tokens = 0.1 * run.parameters if "tokens_per_parameter" in budget else 1e9 / run.flops_per_token
        steps = round(tokens / 64)
        assert steps > 20
    assert (experiment.steps(run, 64) or 0) == steps


def test_widths_scale_heads_and_the_inner_width(tmp_path):
    experiment = read_experiment(write_experiment(tmp_path))
    runs = {run.group: run.config for run in experiment.runs((32, 64))}
    assert list(runs) == ["base", "qk_norm=false", "base-width64", "qk_norm=false-width64"]
    wide = runs["base-width64"]
    assert (wide.hidden_size, wide.intermediate_size, wide.num_attention_heads, wide.num_key_value_heads) == (
        64,
        128,
        4,
        2,
    )
    with pytest.raises(LabError, match="multiple of the base's head_dim, 16"):
        experiment.runs((32, 40))


def test_everything_wrong_is_told_at_once(tmp_path):
    path = write_experiment(
        tmp_path,
        axes={"norm_placment": ["pre"], "norm_type": ["batch_norm"], "qk_norm": [False], "rope_parameters": [{"a": 1}]},
        configs={"base": {"qk_norm": False}, "wide": 3},
        budget={"token": 5},
        data={"files": ["nowhere.txt"], "sequence_length": 0, "held_out_share": 0.9},
        training={"learning_rat": 1, "max_steps": 3},
        seeds=[-1],
        equal="size",
        sedes=[1],
    )
    with pytest.raises(LabError) as refused:
        read_experiment(path)
    told = str(refused.value)
    for problem in (
        "the experiment has no 'sedes'. Did you mean 'seeds'?",
        "data: no such file: nowhere.txt",
        "data: sequence_length must be a positive integer, not 0",
        "data: held_out_share must be a positive number up to 0.5, not 0.9",
        "training has no 'learning_rat'. Did you mean 'learning_rate'?",
        "training: max_steps is set by the lab itself",
        "equal must be one of parameters, flops, nothing, not 'size'",
        "budget has no 'token'. Did you mean 'tokens'?",
        "seeds must be a list of integers of 0 or more",
        "Did you mean 'norm_placement'?",
        "norm_type=batch_norm: norm_type must be one of layer_norm, rms_norm",
        "give it a name under 'configs'",
        "base: stands twice",
        "configs: wide must be a mapping",
    ):
        assert problem in told, f"{problem}\n{told}"
    assert told.count("learning_rat'") == 1, "a name that is not there has no type"
    assert "must be ," not in told


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("base: [", "not YAML"),
        ("- 1", "an experiment is a mapping"),
        ("seeds: [0]\nseeds: [1]", "'seeds' stands twice"),
        ("base: {preset: bert}\nbudget: {tokens: 5}", "'bert' is not a decoder"),
        ("base: !!python/object/apply:os.system [ls]", "not YAML"),
        ("data: {tokenizer: ./nowhere}\nbudget: {tokens: 5}", "the tokenizer ./nowhere cannot be loaded"),
        ("training: {learning_rate: fast}", "training: learning_rate must be a number, not 'fast'"),
        ("training: {learning_rate: null}", "training: learning_rate must be a number, not None"),
        ("training: {bf16: 'yes'}", "training: bf16 must be true or false, not 'yes'"),
        ("training: {per_device_train_batch_size: 1.5}", "per_device_train_batch_size must be an integer, not 1.5"),
        ("data: {tokenizer: [1]}", r"data: tokenizer must be a folder or Hub id, not \[1\]"),
        ("data: {files: [3]}", "data: files must be paths or patterns, not 3"),
        ("budget: {minutes: 1}\ntraining: {lr_scheduler_type: linear}", "lr_scheduler_type: with a budget of minutes"),
    ],
)
def test_what_is_no_experiment_is_refused(tmp_path, text, problem):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(LabError, match=problem):
        read_experiment(path)


def test_configs_that_cannot_be_equal_are_all_named(tmp_path):
    path = write_experiment(
        tmp_path, axes={"num_hidden_layers": [40, 50]}, configs={"fixed": {"intermediate_size": 8, "qk_norm": False}}
    )
    with pytest.raises(LabError) as refused:
        read_experiment(path).runs()
    told = str(refused.value)
    assert "num_hidden_layers=40: no intermediate_size gives it" in told
    assert "num_hidden_layers=50: no intermediate_size" in told
    assert "fixed: intermediate_size is chosen so that parameters are equal" in told
