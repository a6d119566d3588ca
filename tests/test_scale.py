"""Two processes on gloo and the CPU: the losses, weights, logits and texts of one process.

One world of two processes does all tasks of `scale_steps.py`; they are forks of one process.
"""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import page_blocks
import pytest
import scale_steps
import torch
import torch.distributed.checkpoint as checkpoint
from fork_server import program
from pairs import assert_close, assert_gradients_close, config

import blockformer
from blockformer.model.attention import Attention
from blockformer.model.feed_forward import FeedForward
from blockformer.model.normalization import RMSNorm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scale.md"
TASKS = ["ddp", "masked_lm", "fsdp", "ddp_experts", "fsdp_experts", "tensor_parallel"]


def blocks(language):
    """The fenced blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def world(processes, folder, tasks, size=2):
    """What each process of a world answers, by task; an error of one is an error here."""
    arguments = [Path(scale_steps.__file__).parent, folder, json.dumps(tasks), size]
    done = processes.run(program("world"), *arguments, folder=folder, elsewhere=False)
    assert done.returncode == 0, done.stderr
    return {task: [torch.load(folder / f"{task}-{rank}.pt") for rank in range(size)] for task in tasks}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("world")


CASES = [
    pytest.param(name, marks=[] if name in scale_steps.USUAL else pytest.mark.exhaustive) for name in scale_steps.MODELS
]


@pytest.fixture(scope="module")
def alone(folder, request):
    """One process's answers, by name, for the models that this run asks for; they are saved for the others."""
    answered = test_tensor_parallel_answers_are_those_of_one_process.__name__
    own = [item for item in request.session.items if item.path == request.path and item.originalname == answered]
    asked = {item.callspec.params["name"] for item in own}
    found = {}
    for name, make in scale_steps.MODELS.items():
        if name in asked:
            torch.manual_seed(0)
            model = make().eval()
            model.save_pretrained(folder / f"model-{len(found)}")
            found[name] = scale_steps.answers(model)
    (folder / "models.json").write_text(json.dumps(list(found)))
    return found


@pytest.fixture(scope="module")
def together(folder, alone, processes):
    return world(processes, folder, TASKS)


@pytest.mark.parametrize("task", ["ddp", "fsdp"])
def test_steps_of_two_processes_are_those_of_one(together, task):
    one = scale_steps.alone()
    assert one["losses"][0] != one["losses"][-1]
    for answer in together[task]:
        assert_close(answer["losses"], one["losses"], tolerance=1e-6)
        assert_gradients_close(answer["weights"], one["weights"])


@pytest.mark.parametrize("task", ["ddp_experts", "fsdp_experts"])
def test_experts_learn_in_two_processes_as_in_one(together, task):
    one = scale_steps.steps(scale_steps.small_sparse(), 0, 1)
    for answer in together[task]:
        assert_close(answer["losses"], one["losses"], tolerance=1e-6)
        assert_gradients_close(answer["weights"], one["weights"])


def test_every_weight_of_a_masked_language_model_learns_in_two_processes(together):
    """The second step fails where a weight, of a pooler that nobody reads, got no gradient in the first."""
    one = scale_steps.steps(scale_steps.small_masked_lm(), 0, 1)
    for answer in together["masked_lm"]:
        assert_close(answer["losses"], one["losses"], tolerance=1e-6)
        assert_gradients_close(answer["weights"], one["weights"])


def test_a_sharded_checkpoint_is_loaded_by_one_process(together, folder):
    shards = list((folder / "shards").glob("*.distcp"))
    assert len(shards) == 2
    model = scale_steps.small_model()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=str(folder / "shards"), no_dist=True)
    model.load_state_dict(state["model"])
    trained = together["fsdp"][0]["weights"]
    own = dict(model.named_parameters())
    assert own.keys() == trained.keys()
    assert all(torch.equal(own[name], weight) for name, weight in trained.items())


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_answers_are_those_of_one_process(together, alone, name):
    one = alone[name]
    for answer in (found[name] for found in together["tensor_parallel"]):
        assert_close(answer["logits"], one["logits"])
        assert torch.equal(answer.get("text", torch.empty(0)), one.get("text", torch.empty(0)))
        for loss in ("loss", "loss in chunks"):
            assert_close(answer[loss], one["loss"])
        assert_gradients_close(answer["gradients"], one["gradients"])
    # Every projection is shared out, half of its rows or columns in each process, but those that are whole in each.
    whole = alone[name]["gradients"]
    parts = together["tensor_parallel"][0][name]["local_sizes"]
    projections = [weight for weight in whole if re.search(r"_proj(\.weight)?$", weight)]
    with torch.device("meta"):
        config = scale_steps.MODELS[name]().config
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    kinds = kinds[: getattr(config, "num_hidden_groups", None)]
    # An attention has four, one with a state one, both together five; a network has two at least.
    networks = getattr(config, "mlp_layers", None) or [True] * len(kinds)
    least = (1 if kind in ("linear_attention", "conv", "state_space") else 4 + ("state" in str(kind)) for kind in kinds)
    assert len(projections) >= sum(least) + 2 * sum(networks)
    for weight in projections:
        is_whole = re.search(scale_steps.whole_in(config), weight) is not None
        assert parts[weight] * (1 if is_whole else 2) == whole[weight].numel(), weight


@pytest.mark.parametrize("name", CASES)
def test_every_rule_of_a_plan_names_modules_and_every_projection_has_one(name):
    with torch.device("meta"):
        model = scale_steps.MODELS[name]()
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]  # experts are parameters of their module
    names = {re.sub(r"\.\d+\.", ".*.", each) for each in names}
    plan, whole = model.tp_plan, scale_steps.whole_in(model.config)
    assert set(plan) <= names
    shared = {each for each in names if re.search(r"_proj$|embedding$|lm_head$", each)}
    assert {each for each in shared if not re.search(whole, each)} <= set(plan)


def launched(command, folder, steps):
    """What a run of `scale_train.py` gives: its answer and the weights."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }
    script = [str(Path(scale_steps.__file__).with_name("scale_train.py")), str(folder), str(steps)]
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"answer-{steps}.json").read_text()), torch.load(folder / f"weights-{steps}.pt")


@pytest.mark.exhaustive
def test_accelerate_launches_trainer_and_it_resumes(tmp_path):
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "config.yaml")]
    launch += ["--num_processes", "2", "--mixed_precision", "no"]
    folders = [tmp_path / "alone", tmp_path / "together"]
    for folder in folders:
        folder.mkdir()
    one, weights = launched([sys.executable], folders[0], 4)
    launched(launch, folders[1], 2)
    two, their_weights = launched(launch, folders[1], 4)
    assert (one["world"], one["resumed"]) == (1, None)
    assert (two["world"], two["kind"]) == (2, "DistributedType.MULTI_CPU")
    assert two["resumed"] == str(folders[1] / "checkpoint-2")
    assert len(one["losses"]) == 4
    assert_close(two["losses"], one["losses"])
    assert_close(their_weights, weights)


# The page


def test_the_block_on_shards_makes_a_repo_of_them(together, folder, tmp_path, monkeypatch):
    """Of the shards that two processes saved."""
    monkeypatch.chdir(tmp_path)
    scale_steps.small_model().config.save_pretrained("run")
    shutil.copytree(folder / "shards", "run/checkpoint-1000/pytorch_model_fsdp_0")
    page_blocks.run("scale.md", "checkpoint.load(")
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained("my-model")
    trained = together["fsdp"][0]["weights"]
    assert all(torch.equal(weight, trained[name]) for name, weight in model.named_parameters())


@pytest.mark.slow
def test_the_block_on_tensor_parallelism_runs_in_two_processes(tmp_path):
    """By torchrun, in processes that know of this package only by the block."""
    model = scale_steps.small_model().eval()
    blockformer.export_model(model, tmp_path / "my-model")
    more = "ids = __import__('torch').tensor([[5, 6, 7, 8]])\n"
    more += "written = model.generate(ids, max_new_tokens=6, do_sample=False)\n"
    more += "weight = model.model.layers[0].self_attn.q_proj.weight\n"
    more += "part = __import__('pathlib').Path('part-' + __import__('os').environ['RANK'])\n"
    more += "part.write_text(repr((weight.to_local().numel(), written.tolist())))\n"
    (tmp_path / "generate.py").write_text(page_blocks.block("scale.md", "DistributedConfig(") + more)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "generate.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [ast.literal_eval((tmp_path / f"part-{rank}").read_text()) for rank in range(2)]
    expected = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False).tolist()
    half = model.model.layers[0].self_attn.q_proj.weight.numel() // 2
    assert parts == [(half, expected)] * 2


@pytest.mark.parametrize("text", blocks("yaml"), ids=["ddp", "fsdp"])
def test_configurations_of_accelerate_are_understood_by_it(tmp_path, monkeypatch, text):
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "config.yaml"
    file.write_text(text)
    read = load_config_from_file(str(file))
    assert isinstance(read, ClusterConfig)
    assert (read.num_processes, read.mixed_precision) == (8, "bf16")
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    if read.fsdp_config:
        assert all(hasattr(arguments, name) for name in read.fsdp_config)
        for name, value in read.fsdp_config.items():
            setattr(arguments, name, value)
        arguments.use_fsdp, arguments.num_processes, arguments.mixed_precision = True, 8, "bf16"
        arguments.num_machines, arguments.machine_rank, arguments.dynamo_backend = 1, 0, "no"
        for name, value in prepare_multi_gpu_env(arguments).items():
            if name.startswith("FSDP_"):
                monkeypatch.setenv(name, value)
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.fsdp_version, plugin.transformer_cls_names_to_wrap) == (2, ["Layer"])
        assert plugin.reshard_after_forward is True
        plugin.set_auto_wrap_policy(scale_steps.small_model())
        assert not plugin.activation_checkpointing


def test_the_configuration_of_deepspeed_is_understood(tmp_path):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    (text,) = blocks("json")
    file = tmp_path / "zero3.json"
    file.write_text(text)
    read = HfDeepSpeedConfig(str(file))
    assert read.is_zero3()
    assert not read.is_offload()
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed itself is not installed")
    settled = {key: value for key, value in json.loads(text).items() if value != "auto"}
    settled |= {"bf16": {"enabled": True}, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    theirs = runtime.DeepSpeedConfig({**settled, "gradient_accumulation_steps": 1})
    assert theirs.zero_config.stage == 3
    assert theirs.zero_config.gather_16bit_weights_on_model_save


def test_every_configuration_of_the_page_is_tested():
    assert len(blocks("yaml")) == 2
    assert len(blocks("json")) == 1
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 6
    assert named <= set(globals())


# What vLLM's transformers backend does to a model


@pytest.mark.parametrize("name", CASES)
def test_what_vllm_asks_of_a_class(name):
    with torch.device("meta"):
        model = scale_steps.MODELS[name]()
    assert model.is_backend_compatible()
    assert "AutoModel" in model.config.to_dict()["auto_map"]
    if not model.config.is_encoder_decoder:
        body = model.base_model
        assert type(body.get_decoder()) is type(body)
        assert list(model.config.base_model_pp_plan) == ["embed_tokens", "layers", "norm"]
        assert model.config.num_nextn_predict_layers == 0  # it adds this to the number of layers
        assert [kind for _, kind in body.named_modules() if isinstance(kind, torch.nn.ModuleList)] == [body.layers]


class OfAnEngine(torch.nn.Module):
    """A linear layer of another library in the place of ours."""

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, states):
        return self.plain(states)


class AttentionOfAnEngine:
    """Attention over the flat tokens of several sequences, whose lengths the engine knows; notes who asked."""

    def __init__(self, lengths):
        self.lengths, self.layers = lengths, []

    def __call__(self, module, query, key, value, scaling, sliding_window):
        self.layers.append(module.layer_idx)
        parts = (states.split(self.lengths, dim=2) for states in (query, key, value))
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                *part, is_causal=module.is_causal, scale=scaling, enable_gqa=True
            )
            for part in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)


def engine_attention(module, query, key, value, attention_mask, scaling, attention_instances, **kwargs):
    """As vLLM's: it overlooks the mask."""
    assert attention_mask is None
    own = attention_instances[module.layer_idx]
    return own(module, query, key, value, scaling, kwargs["sliding_window"]), None


@pytest.fixture
def engine(monkeypatch):
    from transformers import AttentionInterface

    AttentionInterface.register("vllm", engine_attention)
    yield "vllm"
    AttentionInterface._global_mapping.pop("vllm")


@pytest.mark.parametrize("name", ["grouped heads, q/k norm", "tied, learned positions, biases"])
def test_an_attention_of_an_engine_gets_what_it_needs(engine, name):
    torch.manual_seed(0)
    model = scale_steps.MODELS[name]().eval()
    rows = [scale_steps.token_ids(1, length, seed=length) for length in (7, 3, 5)]
    with torch.no_grad():
        alone = torch.cat([model.base_model(row).last_hidden_state for row in rows], dim=1)
    for pattern, _ in model.tp_plan.items():
        for place, module in list(model.named_modules()):
            if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), place) and "proj" in place:
                parent, _, child = place.rpartition(".")
                setattr(model.get_submodule(parent), child, OfAnEngine(module))
    assert sum(isinstance(module, OfAnEngine) for module in model.modules()) >= 12
    model.config._attn_implementation = engine
    instances = {layer: AttentionOfAnEngine([7, 3, 5]) for layer in range(2)}
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        outputs = model.base_model(
            input_ids=torch.cat(rows, dim=1),
            position_ids=positions,
            use_cache=False,
            attention_instances=instances,
            return_dict=False,
        )
    assert [instance.layers for instance in instances.values()] == [[0], [1]]
    assert_close(outputs[0], alone)


def test_relative_positions_are_refused_where_they_would_be_overlooked(engine):
    model = scale_steps.MODELS["encoder, relative keys, tied"]()
    model.config._attn_implementation = engine
    with pytest.raises(ValueError, match="'vllm' does not support a relative position term"):
        model(scale_steps.token_ids(1, 4), attention_instances={})


def source_of(kind):
    """The syntax tree of a module's `forward`."""
    return ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))


def test_attention_is_looked_up_once_and_called_once():
    """As vLLM finds it, in the source: a name for what ALL_ATTENTION_FUNCTIONS gives, and one call of that name."""
    nodes = list(ast.walk(source_of(Attention)))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    looked_up = [node for node in assigned if ast.unparse(node.value.func).startswith("ALL_ATTENTION_FUNCTIONS.")]
    assert len(looked_up) == 1
    (name,) = looked_up[0].targets
    (call,) = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == name.id]
    assert {word.arg: ast.unparse(word.value) for word in call.keywords}["scaling"] == "self.scaling"


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Attention, ["q_proj", "k_proj", "v_proj"]), (FeedForward, ["gate_proj", "up_proj", "act_fn"])],
)
def test_layers_that_become_one_stand_once_in_the_source(kind, names):
    """vLLM rewrites these calls, and may: no layer is named again, but to ask whether it is there."""
    tree = source_of(kind)
    calls, guards = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            calls.setdefault(ast.unparse(node.func), []).append(node.args[0])
        if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None":
            guards.append(node.left)
    for name in names:
        uses = [node for node in ast.walk(tree) if ast.unparse(node) == f"self.{name}" and node not in guards]
        assert len(uses) == len(calls[f"self.{name}"]) == 1
    arguments = {ast.unparse(calls[f"self.{name}"][0]) for name in names if name != "act_fn"}
    assert arguments == {"hidden_states"}


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def test_what_a_symbolic_trace_sees():
    """No question is asked of the states on the way to the products, and none in a norm."""
    model = blockformer.BlockformerDecoderModel(config()).eval()
    tracer = LeafTracer()
    with pytest.raises(torch.fx.proxy.TraceError):  # without shapes it gets no further than the heads
        tracer.trace(model.layers[0].self_attn)
    assert [node.target for node in tracer.graph.nodes if node.op == "call_module"] == ["q_proj", "k_proj", "v_proj"]
    called = [node.target for node in LeafTracer().trace(model.layers[0].mlp).nodes if node.op == "call_module"]
    assert called == ["gate_proj", "act_fn", "up_proj", "down_proj"]
    called = [getattr(node.target, "__name__", node.target) for node in LeafTracer().trace(RMSNorm(4, 1e-6)).nodes]
    assert {"rms_norm", "mul"} <= set(called)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_of_no_class_of_ours(name):
    """bitsandbytes, GGUF, FP8 and GLoRA take `nn.Linear` alone, and none of its subclasses."""
    with torch.device("meta"):
        model = scale_steps.MODELS[name]()
    kinds = {type(module) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {torch.nn.Linear}


def test_the_factor_of_the_logits_is_a_number(tmp_path):
    """vLLM multiplies by it. In repos of earlier versions it is null."""
    scales = [blockformer.preset(name).logit_scale for name in blockformer.PRESETS]
    assert all(isinstance(scale, float) for scale in scales)
    config().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["logit_scale"] == 1.0
    (tmp_path / "config.json").write_text(json.dumps({**fields, "logit_scale": None}))
    assert blockformer.BlockformerDecoderConfig.from_pretrained(tmp_path).logit_scale == 1.0
