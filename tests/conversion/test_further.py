"""Layers that predict further tokens, in and out: the states of the library's own layers, and every tensor back.

transformers leaves these layers out of its models and makes them anew for drafts (`MtpLayer`), of which
it has no saved form: the checkpoints here are its models with such layers added, named as the released ones.
"""

import copy

import pytest
import torch
import transformers
from pairs import assert_close
from sizes import OFFICIAL_DECODER
from transformers import modeling_layers
from transformers.cache_utils import DynamicCache

from blockformer.conversion import convert, from_official
from blockformer.conversion.families.registry import FAMILIES

from .oracles import assert_verified, edit_config, edit_tensors, entries_of, official_class, stored
from .test_fp8 import in_8_bits
from .test_with_experts import FURTHER_SIZES

pytestmark = [
    pytest.mark.skipif(not hasattr(modeling_layers, "MtpLayer"), reason="this transformers has no MtpLayer"),
    pytest.mark.filterwarnings("ignore:.*more tensors of layers that predict further tokens"),
]
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATES |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
STATES["initializer_range"] = 0.1  # with larger weights 1e-5 of the logits is rounding on some processors
STATES["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
SIZES = {
    "deepseek_v3": {**FURTHER_SIZES["deepseek_v3"], "num_nextn_predict_layers": 2},
    "glm4_moe": {**FURTHER_SIZES["glm4_moe"], "num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {**FURTHER_SIZES["ernie4_5_moe"], "num_nextn_predict_layers": 1},
    "glm4_moe_lite": {**FURTHER_SIZES["glm4_moe_lite"], "num_nextn_predict_layers": 1},
    "hy_v3": {**FURTHER_SIZES["hy_v3"], "num_nextn_predict_layers": 1},
    "mellum": {**FURTHER_SIZES["mellum"], **WINDOWS, "num_mtp_layers": 1},
    "exaone_moe": {**FURTHER_SIZES["exaone_moe"], **WINDOWS, "num_nextn_predict_layers": 1},
    "qwen3_next": {**STATES, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": STATES,
}
KINDS = dict.fromkeys(("mellum", "exaone_moe"), "sliding_attention")
"""Family -> what the layer's attention is, if it has a window."""
PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")
BEYOND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
LIKE_DEEPSEEK = ("model.layers.{}.", *(f"model.layers.{{}}.{name}" for name in BEYOND))
LIKE_QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
LIKE_ERNIE = ("model.mtp_block.0.", *(f"model.mtp_{name}.0" for name in ("emb_norm", "hidden_norm", "linear_proj")))
LIKE_HUNYUAN = (*LIKE_DEEPSEEK[:-1], "model.layers.{}.final_layernorm")
LAYOUTS = dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), LIKE_DEEPSEEK)
LAYOUTS |= {"ernie4_5_moe": LIKE_ERNIE, "hy_v3": LIKE_HUNYUAN}
"""Family -> what the names of the layer's tensors begin with, and of `PARTS`; of others they are `LIKE_QWEN`."""


def published(layer, first, *others):
    """The tensors of a layer of the library's, as released checkpoints name them."""
    tensors, names = {}, dict(zip(PARTS, others, strict=False))
    for name, tensor in layer.state_dict().items():
        part, _, rest = name.partition(".")
        if part != "mtp_block":
            tensors[f"{names[part]}.{rest}"] = tensor
        elif "mlp.experts." in rest:
            parts = ("gate_proj", "up_proj") if "gate_up" in rest else ("down_proj",)
            for number, expert in enumerate(tensor):
                for kind, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                    tensors[f"{first}mlp.experts.{number}.{kind}.weight"] = matrix
        else:
            tensors[first + rest] = tensor
    return tensors


def _as_in_files(name):
    """The name of a tensor of Hy3 in released files."""
    name = name.replace("mlp.gate.weight", "mlp.router.gate.weight").replace(".shared_experts.", ".shared_mlp.")
    return name.replace("mlp.e_score_correction_bias", "mlp.expert_bias")


def folder_with_whole_layers(folder, family):
    """A checkpoint, its model and its further layers, which are drawn at random."""
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    config = FAMILIES[family].settings.official_class(**{**OFFICIAL_DECODER, **SIZES[family]})
    model = official_class(family)(config).eval()
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types, one.first_k_dense_replace = 1, [KINDS.get(family, "full_attention")], 0
    if hasattr(one, "mlp_layer_types"):
        one.mlp_layer_types = ["dense" if family == "exaone_moe" else "sparse"]
    kinds = type(model.model.layers[-1]), type(model.model.norm)
    count, tensors = SIZES[family].get("num_nextn_predict_layers", 1), {}
    layout = LAYOUTS.get(family, LIKE_QWEN)
    shared = {} if len(layout) > len(PARTS) else {"use_post_norm": False}
    layers = [modeling_layers.MtpLayer(one, *kinds, 0, **shared).eval() for _ in range(count)]
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            torch.nn.init.normal_(weight, 1.0 if "norm" in name and "deep" in family else 0.0, 0.4)
        first, *others = (name.format(config.num_hidden_layers + number) for name in layout)
        tensors |= published(layer, first, *others)
        if family == "hy_v3":
            tensors = {_as_in_files(name): tensor for name, tensor in tensors.items()}
        if layout is LIKE_DEEPSEEK:  # the released ones repeat these
            tensors |= {f"{first}embed_tokens.weight": model.model.embed_tokens.weight}
            tensors |= {f"{first}shared_head.head.weight": model.lm_head.weight}
    model.save_pretrained(folder)
    edit_tensors(folder, **tensors)
    return model, layers


@torch.no_grad()
def states_of_theirs(model, layers, ids):
    """States [1, T - k, C] of each layer k, by the library's layers and without any padding."""
    states, found = model.model(ids).last_hidden_state, []
    for number, layer in enumerate(layers, 1):
        vectors, states = model.model.embed_tokens(ids[:, number:]), states[:, :-1]
        places = torch.arange(vectors.shape[1])[None] + number
        axes = places.expand(3, 1, -1) if "Qwen3_5" in type(model).__name__ else places
        of_type = {"layer_type": "sliding_attention"} if model.config.model_type == "mellum" else {}
        rotations = model.model.rotary_emb(vectors, axes, **of_type)
        mask = torch.full((vectors.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        if model.config.model_type in KINDS:
            mask = mask + torch.full_like(mask, -torch.inf).tril(-model.config.sliding_window)
        states = layer(vectors, states, rotations, mask, places, DynamicCache())
        states = model.model.norm(states) if layer.post_norm is None else states
        found.append(states)
    return found


@torch.no_grad()
def states_of_ours(model, ids):
    states, found = model.model(ids).last_hidden_state, []
    shared = model.model.norm if model.config.nextn_final_norm == "shared" else None
    for number, layer in enumerate(model.mtp, 1):
        states = layer(states[:, :-1], model.get_input_embeddings()(ids[:, number:]), shared)
        found.append(states)
    return found


@pytest.mark.parametrize("family", SIZES)
def test_whole_layers_become_modules_and_come_back(tmp_path, family):
    theirs, layers = folder_with_whole_layers(tmp_path / "src", family)
    report = convert(tmp_path / "src", tmp_path / "repo", verify="full")
    assert_verified(report)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repo")
    assert ours.config.num_nextn_predict_layers == len(layers)
    ids = torch.randint(3, 131, (1, 12))
    assert_close(states_of_ours(ours, ids), states_of_theirs(theirs, layers, ids))
    back = convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "src")
    assert not any("not written" in note for note in back.notes)
    loaded = from_official(tmp_path / "src")
    assert_close(states_of_ours(loaded, ids), states_of_theirs(theirs, layers, ids))
    if LAYOUTS.get(family) is LIKE_DEEPSEEK:
        assert any("2 more tensors" in n or "4 more tensors" in n for n in report.notes)
    if "linear_attention" not in (getattr(theirs.config, "layer_types", None) or ()):  # a state cannot be drafted for
        plain = ours.generate(ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(ours.generate(ids, max_new_tokens=20, do_sample=False, use_mtp=True), plain)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "ernie4_5_moe"])
def test_trained_layers_are_written_and_so_are_new_ones(tmp_path, family):
    folder_with_whole_layers(tmp_path / "src", family)
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repo")
    with torch.no_grad():
        ours.mtp[0].projection.weight.mul_(2)
    ours.save_pretrained(tmp_path / "repo2")
    convert(tmp_path / "repo2", tmp_path / "fresh", to_official=True, family=family, verify=False)
    again = from_official(tmp_path / "fresh")
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", "ernie4_5_moe"])
def test_layers_with_a_part_missing_are_kept_beside_the_model(tmp_path, family):
    folder_with_whole_layers(tmp_path / "src", family)
    names = [
        name
        for name in stored(tmp_path / "src")
        if name.endswith(("hnorm.weight", "norm_hidden.weight", "hidden_norm.0.weight"))
    ]
    edit_tensors(tmp_path / "src", **{names[0]: None})
    report = convert(tmp_path / "src", tmp_path / "repo", verify=False)
    assert any("not part of the model" in note and "kept for the way back" in note for note in report.notes)
    assert not entries_of(tmp_path / "repo").get("num_nextn_predict_layers")
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "src")


def test_whole_layers_of_8_bits_become_modules_too(tmp_path):
    _, layers = folder_with_whole_layers(tmp_path / "src", "deepseek_v3")
    edit_tensors(tmp_path / "src", lambda tensors: {name: each.bfloat16() for name, each in tensors.items()})
    edit_config(tmp_path / "src", dtype="bfloat16")
    plain = in_8_bits(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "repo", verify=False)
    assert any("4 more tensors" in note and "left out" in note for note in report.notes)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repo")
    assert torch.equal(ours.mtp[1].projection.weight, plain["model.layers.3.eh_proj.weight"])
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert entries_of(tmp_path / "back")["num_nextn_predict_layers"] == len(layers)
    assert {name for name in plain if name not in stored(tmp_path / "back")} == {
        f"model.layers.{number}.{name}.weight" for number in (2, 3) for name in ("embed_tokens", "shared_head.head")
    }


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_the_types_of_mellums_layer_are_written(tmp_path, kind):
    folder_with_whole_layers(tmp_path / "src", "mellum")
    edit_config(tmp_path / "src", mtp_layer_types=[kind])
    ours = from_official(tmp_path / "src")
    assert ours.config.nextn_layer == ("first" if kind == "sliding_attention" else "last")
    assert ours.mtp[0].decoder.config.layer_types == [kind]
    ours.save_pretrained(tmp_path / "repo")
    convert(tmp_path / "repo", tmp_path / "fresh", to_official=True, family="mellum", verify=False)
    assert entries_of(tmp_path / "fresh")["mtp_layer_types"] == [kind]
    assert from_official(tmp_path / "fresh").config.nextn_layer == ours.config.nextn_layer


def test_a_layer_like_none_of_the_model_is_kept_beside_it(tmp_path):
    folder_with_whole_layers(tmp_path / "src", "mellum")
    edit_config(tmp_path / "src", layer_types=["full_attention", "full_attention"])
    with pytest.warns(UserWarning, match="are kept for the way back"):
        assert not from_official(tmp_path / "src").config.num_nextn_predict_layers
