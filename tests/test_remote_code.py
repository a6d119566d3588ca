"""An exported repo in a fresh interpreter that cannot import `blockformer`, offline."""

import json
import shutil

import pytest
import torch
from fork_server import program
from pairs import assert_close
from sizes import PUBLISHED

import blockformer
from blockformer.conversion import convert
from blockformer.publishing import code_files

pytestmark = pytest.mark.versions

WORDS = ["def heap(x):", "import textwrap as t"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **PUBLISHED)).eval()


def expected(model, tokenizer):
    batch = tokenizer(WORDS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
    text = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return {"ids": batch.input_ids.tolist(), "logits": logits, "text": text}


def check(found, wanted):
    found = json.loads(found)
    assert found["ids"] == wanted["ids"]
    assert found["text"] == wanted["text"]
    assert_close(torch.tensor(found["logits"]), wanted["logits"])


@pytest.mark.parametrize("name", ["blockformer", "conversion"])
def test_this_package_is_out_of_reach_there(tmp_path, fresh, name):
    with pytest.raises(AssertionError, match=f"{name} is out of reach"):
        fresh(f"import {name}", folder=tmp_path)


def test_a_repo_loads_where_blockformer_is_not_and_saves_itself_with_its_code(tmp_path, fresh, model, tiny_tokenizer):
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    found = fresh(program("remote_decoder"), tmp_path / "repo", tmp_path / "again", json.dumps(WORDS), folder=tmp_path)
    check(found, expected(model, tiny_tokenizer))
    assert (tmp_path / "again/attention.py").read_bytes() == (tmp_path / "repo/attention.py").read_bytes()
    entries = json.loads((tmp_path / "again/config.json").read_text())
    assert entries["auto_map"] == blockformer.BlockformerDecoderConfig.auto_classes


def test_a_plainly_saved_and_a_converted_model_load_just_as_well(tmp_path, fresh, model, tiny_tokenizer):
    """As above, through `save_pretrained` and through the official layout and back."""
    model.save_pretrained(tmp_path / "plain")
    tiny_tokenizer.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "official", to_official=True)
    convert(tmp_path / "official", tmp_path / "repo")
    wanted = expected(model, tiny_tokenizer)
    script = program("remote_decoder") + "print(json.dumps([first, results(sys.argv[4])[3]]))\n"
    arguments = (tmp_path / "repo", tmp_path / "again", json.dumps(WORDS), tmp_path / "plain")
    for found in json.loads(fresh(script, *arguments, folder=tmp_path)):
        check(json.dumps(found), wanted)


def test_nothing_of_a_repo_runs_without_trust(tmp_path, fresh, model, tiny_tokenizer):
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    planted = tmp_path / "PLANTED"
    for name in ("configuration_decoder.py", "modeling_decoder.py"):
        path = tmp_path / "repo" / name
        path.write_text(f"open({str(planted)!r}, 'w').close()\n" + path.read_text())
    config = tmp_path / "repo/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "trust_remote_code": True}))
    assert fresh(program("remote_code_refused"), tmp_path / "repo", planted, folder=tmp_path).endswith("refused")


@pytest.mark.parametrize("way", ["exported", "converted"])
def test_an_encoder_decoder_where_blockformer_is_not(tmp_path, fresh, way):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = blockformer.preset("t5-v1.1", vocab_size=97, head_dim=16, **sizes)
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config).eval()
    ids = torch.randint(2, 97, (2, 9))
    if way == "exported":
        blockformer.export_model(model, tmp_path / "repo")
    else:
        model.save_pretrained(tmp_path / "repo")
    if way == "converted":
        convert(tmp_path / "repo", tmp_path / "official", to_official=True)
        shutil.rmtree(tmp_path / "repo")
        convert(tmp_path / "official", tmp_path / "repo")
    with torch.no_grad():
        wanted = model(ids, decoder_input_ids=ids).logits
    written = [model.generate(ids, max_new_tokens=9, do_sample=False, num_beams=n).tolist() for n in (1, 3)]
    found = json.loads(
        fresh(
            program("remote_encoder_decoder"),
            tmp_path / "repo",
            tmp_path / "again",
            json.dumps(ids.tolist()),
            folder=tmp_path,
        )
    )
    assert found["written"] == written
    assert_close(torch.tensor(found["logits"]), wanted)
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert code_files(config).keys() <= names
    entries = json.loads((tmp_path / "again/config.json").read_text())
    assert entries["auto_map"] == blockformer.BlockformerEncoderDecoderConfig.auto_classes


@pytest.mark.parametrize(
    ("preset", "model_class", "auto_class", "lists"),
    [
        ("qwen3", "BlockformerDecoderForCausalLM", "AutoModelForCausalLM", [True, False]),
        ("bert", "BlockformerEncoderForMaskedLM", "AutoModelForMaskedLM", [False, False]),
        ("t5", "BlockformerEncoderDecoderForConditionalGeneration", "AutoModelForSeq2SeqLM", [False, True]),
    ],
)
def test_a_config_alone_brings_the_code_of_its_models_and_says_what_they_are(
    tmp_path, fresh, preset, model_class, auto_class, lists
):
    """mergekit saves a config beside merged weights; lm-eval decides by the library's lists before it loads a model."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = getattr(blockformer, model_class)(blockformer.preset(preset, num_attention_heads=2, **sizes))
    blockformer.export_model(model, tmp_path / "repo")
    found = fresh(program("remote_config"), tmp_path / "repo", tmp_path / "again", auto_class, folder=tmp_path)
    assert json.loads(found) == lists


SIZED = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
DISTANCES = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
# Preset -> fields besides, so that each block is used.
PARTS = {
    "gpt2": {},
    "bloom": {},
    "qwen3": {"linear_bits": 4, "linear_group_size": 16},
    "qwen2_moe": EXPERTS,
    "bert": {"position_type": "relative_key"},
    "roberta": DISTANCES,
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": {**EXPERTS, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "olmo_hybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "lfm2": {},
    "bamba": {},
    "granitemoehybrid": {},
    "gemma4_text": {"num_hidden_layers": 8, "num_experts": 4, "mlp_layer_types": ["both", "sparse"] * 4},
    "nemotron_h": {"num_hidden_layers": 4},
    "falcon_h1": {},
    "deepseek_v3": {**EXPERTS, "num_nextn_predict_layers": 1, "num_expert_groups": 0, "num_experts_per_tok": 2},
    "ministral3": {},
    "hunyuan_v1_dense": {},
    "apertus": {},
    "nanochat": {},
    "esm": {"mask_token_id": 4},
    "modernbert": {},
    "deberta-v2": DISTANCES,
    "t5": {},
    "t5gemma": {"merged_attention": True, "head_dim": 16, "num_key_value_heads": 1, "decoder_start_token_id": 0},
    "marian": {"decoder_start_token_id": 0},
}


def test_a_repo_works_by_its_own_code_alone(tmp_path, fresh):
    autos, wanted = {}, {}
    for name, fields in PARTS.items():
        config = blockformer.preset(name, **{**SIZED, **fields})
        autos[name], cls = next(
            (auto, getattr(blockformer, target.partition(".")[2]))
            for auto, target in config.auto_classes.items()
            if auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
        )
        model = cls(config).eval()
        blockformer.export_model(model, tmp_path / name)
        ids = torch.arange(2, 18).view(2, 8)
        with torch.no_grad():
            sides = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
            wanted[name] = model(ids, **sides).logits
    found = json.loads(fresh(program("remote_parts"), tmp_path, json.dumps(autos), folder=tmp_path))
    for name, logits in wanted.items():
        assert_close(torch.tensor(found[name]), logits)


LATENT = {"kv_lora_rank": 16, "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5}}
RECORDED = {"qwen2_moe": EXPERTS, "llama": LATENT, "gemma4_text": PARTS["gemma4_text"], "deberta-v2": DISTANCES}


def test_what_parts_record_is_the_same_in_a_repo(tmp_path, fresh):
    """From a folder, the library imports the config's code and the model's apart, so each has classes of its own."""
    autos, wanted = {}, {}
    for name, fields in RECORDED.items():
        config = blockformer.preset(name, **{**SIZED, **fields}, attn_implementation="eager")
        autos[name] = "AutoModelForCausalLM" if config.is_decoder else "AutoModelForMaskedLM"
        model = getattr(blockformer, config.auto_classes[autos[name]].partition(".")[2])(config).eval()
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            output = model(torch.arange(2, 18).view(2, 8), output_attentions=True, output_router_logits=True)
        wanted[name] = [list(output.get(key) or ()) for key in ("attentions", "router_logits")]
        assert len(wanted[name][0]) == config.num_hidden_layers
        assert bool(wanted[name][1]) is bool(config.num_experts)
    found = json.loads(fresh(program("remote_records"), tmp_path, json.dumps(autos), folder=tmp_path))
    for name, recorded in wanted.items():
        assert_close([[torch.tensor(each) for each in kind] for kind in found[name]], recorded)
