"""Files that lack the head which their config names, and tied files that hold the head in place of the embeddings."""

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_model
from sizes import OFFICIAL_DECODER, OFFICIAL_ENCODER

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.doctor import diagnose
from blockformer.summary import summarize

from .oracles import (
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    official_folder,
    stored,
    there_and_back,
)
from .rows import Row, model_of
from .test_encoder_decoder_families import GEMMA
from .test_encoder_families import DEBERTA

ENCODERS = {
    **{name: {} for name in "bert roberta xlm-roberta mpnet albert distilbert electra modernbert eurobert gte".split()},
    "deberta-v2": DEBERTA,
}
HEADLESS = [
    (name, head)
    for name in ENCODERS
    if name in FAMILIES
    for head in FAMILIES[name].heads
    if not head.bare and not head.is_decoder
]
FIRST = {name: next(head for other, head in HEADLESS if other == name) for name, _ in HEADLESS}
USUALLY = [
    pytest.param(*each, marks=[] if FIRST[each[0]] is each[1] else [pytest.mark.exhaustive], id=each[1].official)
    for each in HEADLESS
]


def headless(folder, name, official):
    """The stack of a family, saved with a config that names a head; gives the model."""
    bare = next(head for head in FAMILIES[name].heads if head.bare)
    model = model_of(Row(name, {**ENCODERS[name], "pad_token_id": 1}), OFFICIAL_ENCODER, bare)
    model.save_pretrained(folder / "src")
    edit_config(folder / "src", architectures=[official])
    return model


@pytest.mark.parametrize(("name", "head"), USUALLY)
def test_a_head_without_tensors_is_not_there(tmp_path, name, head):
    model = headless(tmp_path, name, head.official)
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        expected = model(ids).last_hidden_state
        report = there_and_back(tmp_path)
        said = f"architectures names '{head.official}', and the weights have no such head"
        assert [note for note in report.notes if said in note]
        assert entries_of(tmp_path / "back")["architectures"] == [head.official]
        assert_close(transformers.AutoModel.from_pretrained(tmp_path / "dst")(ids).last_hidden_state, expected)
        with pytest.warns(UserWarning, match="no such head"):
            assert_close(from_official(tmp_path / "src")(ids).last_hidden_state, expected)
    assert blockformer.verify(tmp_path / "dst").is_ok


def test_the_config_of_a_headless_file_comes_back_byte_for_byte(tmp_path):
    model = official_folder(tmp_path / "src", "mpnet", "MPNetModel")
    model.config.architectures = ["MPNetForMaskedLM"]
    model.config.save_pretrained(tmp_path / "src")
    there_and_back(tmp_path)
    assert entries_of(tmp_path / "src")["architectures"] == ["MPNetForMaskedLM"]
    assert (tmp_path / "back/config.json").read_bytes() == (tmp_path / "src/config.json").read_bytes()


def test_one_of_two_parts_of_a_head_may_be_missing(tmp_path):
    official_folder(tmp_path / "src", "bert", "BertForMaskedLM")
    edit_config(tmp_path / "src", architectures=["BertForPreTraining"])
    report = there_and_back(tmp_path)
    assert any("another head: converted as BertForMaskedLM" in note for note in report.notes)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "mpnet"])
def test_verify_takes_a_pooler_that_the_head_does_not_read(tmp_path, name):
    official_folder(tmp_path / "src", name, "ForMaskedLM")
    root = FAMILIES[name].names.root
    width = entries_of(tmp_path / "src")["hidden_size"]
    pooler = FAMILIES[name].names.pooler
    weights = {f"{root}{pooler}.weight": torch.randn(width, width), f"{root}{pooler}.bias": torch.randn(width)}
    edit_tensors(tmp_path / "src", **weights)
    there_and_back(tmp_path)
    assert blockformer.verify(tmp_path / "dst").is_ok
    edit_tensors(tmp_path / "dst", **{"model.pooler.dense.bias": torch.randn(width + 1)})
    assert "model.pooler.dense.bias is" in str(blockformer.verify(tmp_path / "dst").problems["weights"])


@pytest.mark.parametrize(
    ("name", "cls"),
    [("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel"), ("bart", "BartForConditionalGeneration")],
)
def test_an_untied_language_model_without_a_head_says_what_to_write(tmp_path, name, cls):
    src = tmp_path / "src"
    official_folder(src, name, cls, tie_word_embeddings=False)
    edit_tensors(src, **{"lm_head.weight": None})
    said = rf"{cls}.* tie_word_embeddings is false.* nothing fills lm_head.weight.*Write \"architectures\""
    for door in (lambda: convert(src, tmp_path / "dst"), lambda: from_official(src)):
        with pytest.raises(ConversionError, match=said):
            door()


def without_rows(tensors):
    return {name: each for name, each in tensors.items() if not name.startswith(("score.", "classification_head."))}


def test_decoders_and_encoder_decoders_without_their_head_are_stacks(tmp_path):
    cases = {
        "no prefix": ("llama", "LlamaModel", {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}),
        "rows": ("llama", "LlamaForSequenceClassification", {}),
        "both stacks": ("bart", "BartForSequenceClassification", {}),
        "only the encoder": ("t5", "T5EncoderModel", {"architectures": ["T5ForConditionalGeneration"]}),
    }
    for case, (name, cls, entries) in cases.items():
        official_folder(tmp_path / case / "src", name, cls)
        edit_tensors(tmp_path / case / "src", without_rows)
        edit_config(tmp_path / case / "src", **entries)
        report = there_and_back(tmp_path / case)
        assert any("no such head" in note for note in report.notes), case


@torch.no_grad()
def test_a_classifier_whose_padding_is_no_token_reads_each_row_at_its_last_place(tmp_path):
    official_folder(tmp_path / "src", "llama", "LlamaForSequenceClassification")
    edit_config(tmp_path / "src", pad_token_id=-1)
    report = there_and_back(tmp_path)
    assert any("pad_token_id -1 is not a token; each row is read at its last place" in note for note in report.notes)
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "src").eval()
    ours = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "dst").eval()
    ids, mask = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0)), torch.ones(3, 9).long()
    mask[1, :3] = mask[2, -3:] = 0
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        assert_close(ours(**inputs).logits, theirs(**inputs).logits)
    assert from_official(tmp_path / "src").config.pad_token_id == -1


def test_an_empty_problem_type_is_none(tmp_path):
    theirs = model_of(Row("bert"), OFFICIAL_ENCODER, FAMILIES["bert"].heads[0])
    theirs.save_pretrained(tmp_path / "src")
    edit_config(tmp_path / "src", problem_type="")
    assert from_official(tmp_path / "src").config.problem_type is None
    convert(tmp_path / "src", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back")["problem_type"] == ""


def test_names_of_wrapped_classes(tmp_path):
    src = tmp_path / "src"
    for name, cls in (("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM"), ("bart", "BartModel")):
        official_folder(src, name, cls)
        edit_config(src, architectures=[f"FSDP{cls}"])
        assert FAMILIES[name].names.variant_of(entries_of(src), load_file(src / "model.safetensors")).head == cls
        for wrapper in ("OptimizedModule", "PeftModelForCausalLM"):
            edit_config(src, architectures=[wrapper])
            for door in (lambda: convert(src, tmp_path / "dst"), lambda: from_official(src), lambda: summarize(src)):
                with pytest.raises(ConversionError, match=r"the name of a wrapper.*write"):
                    door()
            with pytest.raises(ConversionError, match=rf'write "architectures": \["{cls}"\], which fits'):
                convert(src, tmp_path / "dst")


@pytest.mark.parametrize("named", ["RobertaForTokenClassification", "BertCRF"])
def test_a_class_of_another_family_or_of_own_code(tmp_path, named):
    """The tensors of a classifier of rows do not show which it is; the name of its class may."""
    src = tmp_path / "src"
    official_folder(src, "camembert", "CamembertForTokenClassification")
    edit_config(src, architectures=[named])
    likely = "CamembertForTokenClassification" if "For" in named else "CamembertModel"
    for door in (lambda: convert(src, tmp_path / "dst"), lambda: from_official(src), lambda: summarize(src)):
        with pytest.raises(ConversionError, match=rf'{named}.*as in "architectures": \["{likely}"\]'):
            door()
    (finding,) = (each for each in diagnose(src).findings if "architectures" in each.sentence)
    assert named in finding.sentence
    assert "missing" not in finding.sentence


@pytest.mark.parametrize(
    ("name", "cls"), [("bert", "BertForMaskedLM"), ("bert", "BertModel"), ("llama", "LlamaForCausalLM")]
)
def test_without_a_model_type_the_error_names_the_family_of_the_tensors(tmp_path, name, cls):
    src = tmp_path / "src"
    official_folder(src, name, cls)
    edit_config(src, model_type=..., architectures=...)
    others = (lambda: from_official(src), lambda: summarize(src)) if cls == "BertModel" else ()
    for door in (lambda: convert(src, tmp_path / "dst"), *others):
        with pytest.raises(ConversionError, match=rf'model_type is missing.*write "model_type": "{name}"'):
            door()
    assert_verified(convert(src, tmp_path / "dst", family=name))


def test_only_a_gguf_says_how_to_make_plain_weights(tmp_path):
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    doors = (convert, lambda src, dst: from_official(src), export_folder, lambda src, dst: summarize(src))
    for door in doors:
        with pytest.raises(ConversionError, match=r"only as GGUF.*gguf_file='model.Q4_1.gguf'"):
            door(tmp_path, tmp_path.parent / "dst")
    with pytest.raises(ConversionError, match=r"a GGUF file.*gguf_file='model.Q4_1.gguf'"):
        convert(tmp_path / "model.Q4_1.gguf", tmp_path.parent / "dst")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConversionError, match="only as GGUF"):
        convert(tmp_path, tmp_path.parent / "dst")
    summarize(tmp_path)
    (finding,) = (each for each in diagnose(tmp_path).findings if each.kind == "gguf")
    assert "gguf_file='model.Q4_1.gguf'), model.hf_quantizer = None, del" in finding.remedy


TWO_STACKS = dict.fromkeys(("encoder", "decoder"), GEMMA)
TIED = [
    ("llama", "LlamaForCausalLM", OFFICIAL_DECODER),
    ("gpt2", "GPT2LMHeadModel", OFFICIAL_DECODER),
    ("qwen3_moe", "Qwen3MoeForCausalLM", OFFICIAL_DECODER),
    ("roberta", "RobertaForMaskedLM", OFFICIAL_ENCODER),
    ("bert", "BertForMaskedLM", OFFICIAL_ENCODER),
    ("modernbert", "ModernBertForMaskedLM", OFFICIAL_ENCODER),
    ("bart", "BartForConditionalGeneration", OFFICIAL_ENCODER),
    ("marian", "MarianMTModel", OFFICIAL_ENCODER),
    ("t5", "T5ForConditionalGeneration", OFFICIAL_ENCODER),
    ("t5gemma", "T5GemmaForConditionalGeneration", OFFICIAL_ENCODER),
]


def only_the_head(model, folder):
    """A model's file with only the head of the tied tensors; gives its name."""
    model.save_pretrained(folder)
    head = next(name for name in model.all_tied_weights_keys if "bias" not in name and "embed" not in name)
    source = model.all_tied_weights_keys[head]
    tied = {name for name, other in model.all_tied_weights_keys.items() if other == source}
    weights = load_file(folder / "model.safetensors")
    matrix = weights[source]
    edit_tensors(folder, **{**dict.fromkeys((source, *tied)), head: matrix})
    return head


@pytest.mark.parametrize(("name", "cls", "usual"), TIED, ids=[cls for _, cls, _ in TIED])
def test_a_tied_file_may_hold_only_the_head(tmp_path, name, cls, usual):
    head = next(each for each in FAMILIES[name].heads if each.official == cls)
    more = TWO_STACKS if name == "t5gemma" else {"pad_token_id": 1}
    row = Row(name, {"tie_word_embeddings": True, "vocab_size": 131, **more})
    model = model_of(row, {**usual, "decoder_start_token_id": 2}, head)
    stays = only_the_head(model, tmp_path / "src")
    again, info = type(model).from_pretrained(tmp_path / "src", output_loading_info=True)
    assert not info["missing_keys"]
    report = there_and_back(tmp_path, verify_back="quick")
    assert_verified(report)
    assert stays in stored(tmp_path / "back")
    assert blockformer.verify(tmp_path / "dst").is_ok
    assert_same_head(from_official(tmp_path / "src"), again)


def assert_same_head(ours, theirs):
    assert torch.equal(ours.get_output_embeddings().weight, theirs.get_output_embeddings().weight)
    assert torch.equal(ours.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "t5"])
def test_ours_may_hold_only_the_head_too(tmp_path, name):
    """As safetensors writes a tied model: under the first of its names."""
    official_folder(tmp_path / "src", name)
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    cls = getattr(blockformer, entries_of(tmp_path / "ours")["architectures"][0])
    cls = getattr(blockformer, cls.__name__.removesuffix("Model") + "ForMaskedLM") if name == "bert" else cls
    torch.manual_seed(0)
    model = cls(cls.config_class.from_pretrained(tmp_path / "ours", tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "tuned")
    save_model(model, str(tmp_path / "tuned/model.safetensors"), metadata={"format": "pt"})
    assert "lm_head.weight" in stored(tmp_path / "tuned")
    assert blockformer.verify(tmp_path / "tuned").problems.keys() <= {"code"}
    export_folder(tmp_path / "tuned", tmp_path / "exported")
    assert "lm_head.weight" not in stored(tmp_path / "exported")
    assert_verified(convert(tmp_path / "tuned", tmp_path / "back", to_official=True, family=name))
    for folder in ("tuned", "exported"):
        again = cls.from_pretrained(tmp_path / folder)
        assert_same_head(again, model)


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_ours_may_hold_all_names_of_tied_tensors(tmp_path, name):
    """As the state dict of a model has them, which torch.save and DeepSpeed write."""
    model = official_folder(tmp_path / "src", name, tie_word_embeddings=True)
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    state = from_official(tmp_path / "ours").state_dict()
    edit_tensors(tmp_path / "ours", lambda all_: state)
    assert len(stored(tmp_path / "ours")) > len(stored(tmp_path / "src"))
    assert blockformer.verify(tmp_path / "ours").is_ok
    assert_verified(convert(tmp_path / "ours", tmp_path / "back", to_official=True))
    assert_loads_as(tmp_path / "back", model)
    for copy in [each for each in state if each.endswith(("decoder.embed_tokens.weight", "lm_head.weight"))]:
        edit_tensors(tmp_path / "ours", lambda all_, copy=copy: {**state, copy: state[copy] + 1})
        said = set()
        for door in (
            lambda: export_folder(tmp_path / "ours", tmp_path / "exported"),
            lambda: convert(tmp_path / "ours", tmp_path / "again", to_official=True),
        ):
            with pytest.raises(ConversionError, match="ties these tensors, but the stored ones differ") as refused:
                door()
            said.add(str(refused.value).partition(":")[0])
        assert len(said) == 1


@pytest.mark.parametrize(
    "task", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]
)
@pytest.mark.parametrize("door", ["Auto", "class"])
def test_a_classifier_begins_with_the_transform_of_the_language_model(tmp_path, task, door):
    """ModernBERT's official classes have one `head` before either."""
    heads = {each.official: each for each in FAMILIES["modernbert"].heads}
    row = Row("modernbert", {"pad_token_id": 1})
    model_of(row, OFFICIAL_ENCODER, heads["ModernBertForMaskedLM"]).save_pretrained(tmp_path / "src")
    auto = getattr(transformers, f"AutoModelFor{task}")
    expected = auto.from_pretrained(tmp_path / "src").head
    convert(tmp_path / "src", tmp_path / "ours")
    loader = auto if door == "Auto" else getattr(blockformer, f"BlockformerEncoderFor{task}")
    ours = loader.from_pretrained(tmp_path / "ours")
    for name in ("dense", "norm"):
        assert torch.equal(getattr(ours.classifier_transform, name).weight, getattr(expected, name).weight)
    ours.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved").keys() == ours.state_dict().keys()
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(back.lm_head_transform.dense.weight, expected.dense.weight)


def test_a_transform_of_another_width_is_new(tmp_path):
    settings = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "embedding_size": 8}
    config = blockformer.preset("bert", **settings, vocab_size=99, lm_head_transform=True, classifier_transform=True)
    blockformer.BlockformerEncoderForMaskedLM(config).save_pretrained(tmp_path)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert classifier.classifier_transform.dense.weight.shape == (16, 16)
