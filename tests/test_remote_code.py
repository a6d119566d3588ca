"""An exported repo in a fresh interpreter that cannot import `blockformer`, offline."""

import json
import shutil

import pytest
import torch
from fork_server import program
from pairs import assert_close
from repos import CLOSE, SIZES

import blockformer
from blockformer.conversion import convert
from blockformer.publishing import code_files

pytestmark = pytest.mark.versions

WORDS = ["def heap(x):", "import textwrap as t"]

LOADED = (
    CLOSE
    + r"""
import json, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification
repo, again, words = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
trust = {"trust_remote_code": True}

def results(folder):
    config = AutoConfig.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    model = AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
    base = AutoModel.from_pretrained(folder, **trust).eval()
    batch = tokenizer(words, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
        states = base(**batch).last_hidden_state
    assert close(model.lm_head(states), logits)
    alone = model(**batch, labels=batch["input_ids"], return_logits=False)
    assert alone.logits is None
    assert close(alone.loss, model(**batch, labels=batch["input_ids"]).loss)
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
    assert config.model_type == "blockformer_decoder"
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    text = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return model, tokenizer, base, {"ids": batch.input_ids.tolist(), "logits": logits.tolist(), "text": text}

model, tokenizer, base, first = results(repo)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
base.save_pretrained(again + "-base")
_, _, _, second = results(again)
assert close(second.pop("logits"), first["logits"])
assert {**second, "logits": first["logits"]} == first
AutoModel.from_pretrained(again + "-base", **trust)
classifier = AutoModelForSequenceClassification.from_pretrained(repo, num_labels=3, **trust)
assert classifier.score.weight.shape == (3, model.config.hidden_size)
assert "blockformer" not in sys.modules
print(json.dumps(first))
"""
)

SEQ2SEQ = (
    CLOSE
    + r"""
import json, os, torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
repo, again, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
trust = {"trust_remote_code": True}

def results(folder):
    assert AutoConfig.from_pretrained(folder, **trust).model_type == "blockformer_encoder_decoder"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    base = AutoModel.from_pretrained(folder, **trust).eval()
    with torch.no_grad():
        outputs = model(ids, decoder_input_ids=ids)
        assert close(model.logits_of(base(ids, decoder_input_ids=ids).last_hidden_state), outputs.logits)
    written = [model.generate(ids, max_new_tokens=9, do_sample=False, num_beams=n).tolist() for n in (1, 3)]
    return model, {"logits": outputs.logits.tolist(), "written": written}

model, first = results(repo)
model.save_pretrained(again)
second = results(again)[1]
assert close(second.pop("logits"), first["logits"])
assert {**second, "logits": first["logits"]} == first
classifier = AutoModelForSequenceClassification.from_pretrained(repo, num_labels=3, **trust)
assert classifier(ids).logits.shape == (2, 3)
fresh = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(repo, **trust), **trust)
q_proj = fresh.model.encoder.layers[0].self_attn.q_proj.weight
assert abs(q_proj.std().item() * (48 * 16) ** 0.5 - 1) < 0.1  # drawn as T5 draws it, in remote code too
assert not os.path.exists(os.path.join(again, "modeling_decoder.py"))
assert "blockformer" not in sys.modules
print(json.dumps(first))
"""
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **SIZES)).eval()


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
    found = fresh(LOADED, tmp_path / "repo", tmp_path / "again", json.dumps(WORDS), folder=tmp_path)
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
    script = LOADED + "print(json.dumps([first, results(sys.argv[4])[3]]))\n"
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
    found = json.loads(fresh(SEQ2SEQ, tmp_path / "repo", tmp_path / "again", json.dumps(ids.tolist()), folder=tmp_path))
    assert found["written"] == written
    assert_close(torch.tensor(found["logits"]), wanted)
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert {path.name for path in code_files(config)} <= names
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
# Preset -> fields besides, and the optional modules that a repo of it carries.
CARRIED = {
    "gpt2": ({}, set()),
    "bloom": ({}, {"alibi"}),
    "qwen3": ({"linear_bits": 4, "linear_group_size": 16}, {"awq_linear", "rotary"}),
    "qwen2_moe": (EXPERTS, {"experts", "rotary"}),
    "bert": ({"position_type": "relative_key"}, {"relative_keys"}),
    "roberta": (DISTANCES, {"relative_bias"}),  # fields that nothing reads are kept all the same
    "modernbert": ({}, {"rotary"}),
    "deberta-v2": (DISTANCES, {"disentangled", "relative_bias"}),
    "t5": ({}, {"relative_bias"}),
    "marian": ({"decoder_start_token_id": 0}, {"sinusoidal"}),
}

EACH = (
    CLOSE
    + r"""
import json, os, torch, transformers
results = {}
for name, auto_class in json.loads(sys.argv[2]).items():
    folder = os.path.join(sys.argv[1], name)
    model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.arange(2, 18).view(2, 8)
    with torch.no_grad():
        logits = model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})).logits
    code = {each for each in os.listdir(folder) if each.endswith(".py")}
    model.save_pretrained(folder + "-again")
    assert code == {each for each in os.listdir(folder + "-again") if each.endswith(".py")}, name
    results[name] = logits.tolist()
config = transformers.AutoConfig.from_pretrained(os.path.join(sys.argv[1], "gpt2"), trust_remote_code=True)
for kind in ("rotary", "alibi", "sinusoidal"):
    try:
        type(config)(position_type=kind)
    except ValueError as error:
        assert "this repo carries the code of its own positions alone" in str(error), error
    else:
        raise AssertionError(kind)
assert "blockformer" not in sys.modules
print(json.dumps(results))
"""
)


def test_a_repo_carries_what_its_config_uses_and_works_by_that_alone(tmp_path, fresh):
    optional = {"alibi", "awq_linear", "disentangled", "experts"}
    optional |= {"relative_bias", "relative_keys", "rotary", "sinusoidal"}
    autos, wanted = {}, {}
    for name, (fields, carried) in CARRIED.items():
        config = blockformer.preset(name, **{**SIZED, **fields})
        autos[name], cls = next(
            (auto, getattr(blockformer, target.partition(".")[2]))
            for auto, target in config.auto_classes.items()
            if auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
        )
        model = cls(config).eval()
        blockformer.export_model(model, tmp_path / name)
        assert {path.stem for path in (tmp_path / name).glob("*.py")} & optional == carried, name
        ids = torch.arange(2, 18).view(2, 8)
        with torch.no_grad():
            sides = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
            wanted[name] = model(ids, **sides).logits
    found = json.loads(fresh(EACH, tmp_path, json.dumps(autos), folder=tmp_path))
    for name, logits in wanted.items():
        assert_close(torch.tensor(found[name]), logits)
