"""Parts of the code that a repo leaves out because its model does not use them."""

import json
import shutil

import pytest
import torch
from fork_server import program
from own_blocks import SIZES, forgotten_after
from pairs import assert_close, token_ids
from sizes import STRONG

import blockformer
from blockformer.model.awq_linear import LinearFields
from blockformer.model.axes import axes
from blockformer.model.experts import ExpertsFields
from blockformer.model.relative_bias import RelativeBiasFields
from blockformer.publishing import code_files, export_model
from blockformer.publishing.repo_code import MODEL, OPTIONAL, STAND_IN, topology_files

LATENT = {"kv_lora_rank": 16, "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24}
LOW_BITS = {"linear_bits": 4, "linear_group_size": 8, "intermediate_size": 64}
DECODER, ENCODER = blockformer.BlockformerDecoderForCausalLM, blockformer.BlockformerEncoderForMaskedLM
BOTH = blockformer.BlockformerEncoderDecoderForConditionalGeneration
MODELS = {
    "plain": (DECODER, {"position_type": "none"}, set()),
    "rotary": (DECODER, {}, {"rotary"}),
    "alibi": (DECODER, {"position_type": "alibi"}, {"alibi"}),
    "4 bits": (DECODER, LOW_BITS, {"rotary", "awq_linear"}),
    "experts": (DECODER, EXPERTS, {"rotary", "experts"}),
    "latent": (DECODER, {**LATENT, **EXPERTS}, {"rotary", "latent_attention", "experts"}),
    "further tokens": (DECODER, {"num_nextn_predict_layers": 2}, {"rotary", "multi_token"}),
    "learned": (ENCODER, {"position_type": "learned"}, {"vector_positions"}),
    "disentangled": (ENCODER, {"position_type": "disentangled"}, {"disentangled", "relative_bias"}),
    "relative keys": (ENCODER, {"position_type": "relative_key_query"}, {"relative_keys"}),
    "sinusoidal": (
        BOTH,
        {"position_type": "sinusoidal", "decoder_start_token_id": 1},
        {"sinusoidal", "vector_positions"},
    ),
    "merged": (
        BOTH,
        {"merged_attention": True, "embedding_scale": 3.0, "scales_in_embedding": True, "unscaled_token_id": 5}
        | {"decoder_start_token_id": 1},
        {"rotary", "merged_attention", "scaled_embedding", "unscaled_token"},
    ),
    "relative bias": (BOTH, {"position_type": "relative_bias", "decoder_start_token_id": 1}, {"relative_bias"}),
}
"""Name -> the class, settings, and the parts that such a repo has of those that it need not have."""
IDS = token_ids(2, 7) % STRONG["vocab_size"]


def make(name):
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    return kind(kind.config_class(**{**STRONG, **settings})).eval()


def parts_in(folder):
    stand_in = STAND_IN.read_bytes()
    return {name for name in OPTIONAL if (path := folder / f"{name}.py").exists() and path.read_bytes() != stand_in}


def test_every_part_that_may_be_left_out_is_a_part_of_some_topology():
    kinds = [kind.config_class for kind in (DECODER, ENCODER, BOTH)]
    assert {f"{name}.py" for name in OPTIONAL} <= {path.name for kind in kinds for path in topology_files(kind)}


@pytest.fixture(scope="module")
def computed(tmp_path_factory, processes):
    """Each model, its repo, one that its own code has saved, and the logits of both without this package."""
    folder, models = tmp_path_factory.mktemp("repos"), {name: make(name) for name in MODELS}
    for name, model in models.items():
        export_model(model, folder / name)
    (folder / "ids.json").write_text(json.dumps(IDS.tolist()))
    processes.said(program("left_out"), folder, *MODELS, folder=folder)
    return folder, models, torch.load(folder / "logits.pt")


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_repo_has_the_parts_that_its_model_needs_and_computes_the_same(computed, name):
    folder, models, logits = computed
    sides = {"decoder_input_ids": IDS} if models[name].config.is_encoder_decoder else {}
    wanted = models[name](IDS, **sides).logits
    for place in (name, f"{name} again"):
        assert parts_in(folder / place) == MODELS[name][2]
        assert_close(logits[place], wanted)
    assert blockformer.verify(folder / name).is_ok


def test_entries_of_a_part_that_is_left_out_are_not_written(computed):
    folder, models, _ = computed
    for name, model in models.items():
        entries = json.loads((folder / name / "config.json").read_text())
        fields = {
            "experts": axes(ExpertsFields),
            "awq_linear": axes(LinearFields),
            "relative_bias": axes(RelativeBiasFields),
        }
        for part in fields.keys() - MODELS[name][2]:
            assert not entries.keys() & fields[part].keys()
        assert type(model.config).from_pretrained(folder / name).to_dict() == model.config.to_dict()


@pytest.mark.versions
def test_what_is_left_out_is_refused_by_its_name(computed, processes):
    folder, _, _ = computed
    said = json.loads(processes.said(program("left_out_asked"), folder / "learned", folder / "plain", folder=folder))
    fix = "install blockformer"
    assert "has no field 'num_experts'" in said["num_experts"]
    assert "awq_linear, experts, latent_attention" in said["num_experts"]
    assert said["position_type"].startswith("Alibi: this repo leaves out alibi.py, which its model does not use")
    assert said["prepared"].startswith("prepare_for_inference is not in a repo's code")
    assert all(fix in each for each in said.values())


def test_saving_over_a_repo_of_another_model_brings_its_parts(tmp_path):
    make("plain").save_pretrained(tmp_path / "repo")
    assert parts_in(tmp_path / "repo") == set()
    make("experts").save_pretrained(tmp_path / "repo")
    assert parts_in(tmp_path / "repo") == {"rotary", "experts"}
    make("plain").config.save_pretrained(tmp_path / "repo")
    assert parts_in(tmp_path / "repo") == set()
    (tmp_path / "repo/experts.py").write_text("mine = 1\n")
    make("plain").config.to_json_file(tmp_path / "repo/config.json")
    assert (tmp_path / "repo/experts.py").read_text() == "mine = 1\n"


def test_a_block_of_one_s_own_brings_the_parts_that_it_imports(tmp_path):
    with forgotten_after():
        mine = tmp_path / "my_norm.py"
        mine.write_text(
            "from torch import nn\nfrom .blocks import block\nfrom .sinusoidal import SinusoidalPositions\n\n\n"
            '@block("norm_type", "my_norm")\nclass MyNorm(nn.LayerNorm):\n    parts = SinusoidalPositions\n\n'
            "    def __init__(self, config, size):\n        super().__init__(size)\n"
        )
        blockformer.register(mine)
        config = blockformer.BlockformerDecoderConfig(**SIZES, norm_type="my_norm")
        assert code_files(config)["sinusoidal.py"] == MODEL / "sinusoidal.py"
        assert code_files(config)["alibi.py"] == STAND_IN


def test_a_stand_in_is_nothing_else_s_code(computed, tmp_path):
    folder, _, _ = computed
    repo = shutil.copytree(folder / "rotary", tmp_path / "repo")
    shutil.copyfile(STAND_IN, repo / "attention.py")
    assert [each.partition(",")[0] for each in blockformer.verify(repo).problems["code"]] == [
        f"attention.py differs from release {blockformer.__version__}"
    ]
