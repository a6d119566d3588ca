"""Marian, BART and mBART: every head, both ways, and every way in which their checkpoints are written."""

import json

import pytest
import torch
from pairs import assert_close, assert_gradients_close
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.models.mbart.modeling_mbart import shift_tokens_right as shift_tokens_around

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES, family_for
from blockformer.conversion.probes import probes
from blockformer.conversion.rules.operations import LeadingAxis
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE
from blockformer.summary import summarize

from .oracles import (
    BART_SIZES,
    BART_TOKENS,
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    name_of,
    official_class,
    official_folder,
    official_model,
    stored,
    there_and_back,
)
from .outputs import assert_same_outputs, nudged, same_text

VOCAB = 97
BARTS = ("marian", "bart", "mbart")
# mBART is BART with its norms before the sub-layers; what does not depend on them is asked of two families.
USUALLY_TWO = ["marian", "bart", pytest.param("mbart", marks=pytest.mark.exhaustive)]
OWN = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 71}
DRY = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
HEADS = [(family, head) for family in BARTS for head in FAMILIES[family].heads]
SHARED, ENCODER, DECODER = (
    f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
TABLES = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))
OURS = blockformer.BlockformerEncoderDecoderForConditionalGeneration
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "eos_token_id": 1, "decoder_start_token_id": 0}
# What old opus-mt, BART and mBART files say of generation in their config.json.
GENERATION = {
    "num_beams": 3,
    "max_length": 18,
    "bad_words_ids": [[60]],
    "length_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "early_stopping": True,
    "use_cache": True,
}


def inputs(family="bart", vocabulary=VOCAB):
    """A source of three rows and a target, one row of each padded on the right; one end token at each row's end."""
    pad, end = BART_TOKENS[family]["pad_token_id"], BART_TOKENS[family]["eos_token_id"]
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(3, 60, (3, 30), generator=generator), torch.ones(3, 30, dtype=torch.long)
    mask[1, 21:] = 0
    target, target_mask = torch.randint(3, min(60, vocabulary), (3, 30), generator=generator), torch.ones_like(mask)
    target_mask[1, 24:] = 0
    ids[torch.arange(3), mask.sum(-1) - 1] = end
    return {
        "input_ids": ids.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "decoder_input_ids": target.masked_fill(target_mask == 0, pad),
        "decoder_attention_mask": target_mask,
    }


def there_and_back_twice(tmp_path, family, fresh_config=True):
    """A folder `src` through ours and back: verified both ways, nothing lost; then again without what ours remembers.

    What comes back is the source bit for bit, or nearly so, and that was compared with ours on the way in.

    Returns:
        The report of the way in.
    """
    src, dst = tmp_path / "src", tmp_path / "dst"
    report = there_and_back(tmp_path)
    (dst / "conversion.json").unlink()
    assert_verified(convert(dst, tmp_path / "fresh", to_official=True, verify="quick"))
    config_class = FAMILIES[family].settings.official_class
    configs = [config_class.from_pretrained(folder).to_dict() for folder in (tmp_path / "fresh", src)]
    for config in configs:  # with us a setting of generation, which goes into its own file
        config.pop("forced_eos_token_id")
    assert not fresh_config or configs[0] == configs[1]
    return report


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize(("family", "head"), HEADS, ids=name_of)
def test_every_head_there_and_back_twice(tmp_path, family, head):
    model = official_folder(tmp_path / "src", family, head.official, encoder_layers=2, decoder_layers=3)
    report = there_and_back_twice(tmp_path, family)
    assert report.notes == []
    assert report.parity.measured[0].same_text is (True if head.writes_text else None)
    ours = getattr(blockformer, head.ours).from_pretrained(tmp_path / "dst")
    assert_same_outputs(ours, model, inputs(family), spread=0.1)
    assert_loads_as(tmp_path / "back", model)
    source, anew = stored(tmp_path / "src"), stored(tmp_path / "fresh")
    # The official class without a head stores its table of positions too, and computes it where it is not stored.
    computed = {name.removeprefix("model.") for name in TABLES} if head.official == "MarianModel" else set()
    assert anew == {name: tensor for name, tensor in source.items() if name not in computed}


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.bfloat16) for family in BARTS), ("bart", torch.float16)], ids=str
)
def test_smaller_dtypes(tmp_path, family, dtype):
    official_folder(tmp_path / "src", family, dtype=dtype)
    report = there_and_back_twice(tmp_path, family)
    assert [f"torch.{measured.dtype}" for measured in report.parity.measured] == [str(dtype), "torch.float32"]
    model = from_official(tmp_path / "src", dtype="float32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_outputs(
        model, official_class(family).from_pretrained(tmp_path / "src", dtype="float32"), inputs(family), spread=0.1
    )


@pytest.mark.versions
@pytest.mark.parametrize(
    ("head", "size", "tied"),
    [(head, size, tied) for head in ("MTModel", "Model") for size, tied in ((71, True), (130, False))]
    + [("MTModel", 71, False), ("MTModel", 130, True)],
)
def test_vocabularies_of_each_side(tmp_path, head, size, tied):
    own = {**OWN, "decoder_vocab_size": size, "tie_word_embeddings": tied}
    model = official_folder(tmp_path / "src", "marian", head, **own)
    there_and_back_twice(tmp_path, "marian")
    ours = from_official(tmp_path / "src")
    assert ours.config.decoder_vocab_size == size
    assert ours.get_decoder().embed_tokens.weight.shape == (size, 48)
    assert_same_outputs(ours, model, inputs("marian"), spread=0.1)
    if head == "MTModel":
        assert (ours.lm_head.weight is ours.model.decoder.embed_tokens.weight) == tied
        assert_same_text(ours, model, size)


def assert_same_text(ours, theirs, size, **settings):
    source = {name: inputs("marian")[name] for name in ("input_ids", "attention_mask")}
    texts = [m.generate(**source, max_new_tokens=12, do_sample=False, **settings) for m in (ours, theirs)]
    assert torch.equal(*texts)
    assert texts[0].max() < size


@pytest.mark.parametrize("size", [71, 130])
def test_beams_with_vocabularies_of_each_side(tmp_path, size):
    """Older releases of transformers count the source's tokens for beams, and fail with any model of this kind."""
    model = official_folder(tmp_path / "src", "marian", **{**OWN, "decoder_vocab_size": size})
    assert_same_text(from_official(tmp_path / "src"), model, size, num_beams=4, num_return_sequences=3)


def test_probes_ask_only_for_tokens_that_there_are_and_pad_where_the_official_classes_can():
    small = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    small |= {"pad_token_id": 0, "decoder_start_token_id": 0}
    wide = blockformer.preset("marian", **small, share_embeddings=False, decoder_vocab_size=500)
    narrow = blockformer.preset("marian", **small, share_embeddings=False, decoder_vocab_size=9)
    assert max(int(probe.target.max()) for probe in probes(wide)) > VOCAB
    assert max(int(probe.target.max()) for probe in probes(narrow)) < 9
    assert [probe.name for probe in probes(wide)] == ["random", "structured", "padded on the right"]
    assert all(probe.attention_mask[:, 0].all() for probe in probes(wide))
    assert "padded" in [probe.name for probe in probes(blockformer.preset("t5", **small))]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("bart", [ENCODER, DECODER, "lm_head.weight"]),
        ("bart", [DECODER]),
        ("bart", ["-", ENCODER]),
        ("bart", ["-", DECODER, "lm_head.weight"]),
        ("marian", ["-", DECODER, "lm_head.weight"]),
        ("mbart", [ENCODER, DECODER, "lm_head.weight"]),
    ],
    ids=str,
)
def test_embeddings_under_several_names(tmp_path, family, names):
    model = official_folder(tmp_path / "src", family)
    copies = dict.fromkeys((name for name in names if name != "-"), model.model.shared.weight)
    edit_tensors(tmp_path / "src", **copies, **({SHARED: None} if names[0] == "-" else {}))
    there_and_back_twice(tmp_path, family)
    ours = OURS.from_pretrained(tmp_path / "dst")
    assert ours.lm_head.weight is ours.model.encoder.embed_tokens.weight is ours.model.decoder.embed_tokens.weight
    written = {SHARED, "lm_head.weight"} & {SHARED, *names}
    assert stored(tmp_path / "fresh").keys() & {SHARED, ENCODER, DECODER, "lm_head.weight"} == written


@pytest.mark.parametrize("family", USUALLY_TWO)
@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_copies_that_differ_are_refused_by_name(tmp_path, family, name):
    official_folder(tmp_path / "src", family)
    edit_tensors(tmp_path / "src", **{name: torch.randn(VOCAB, 48)})
    with pytest.raises(ConversionError, match=rf"model\.shared\.weight.*{name}"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_a_head_of_its_own_although_the_config_ties_it(tmp_path, family):
    """The official classes keep what is stored, and so does this."""
    official_folder(tmp_path / "src", family)
    edit_tensors(tmp_path / "src", **{"lm_head.weight": torch.randn(VOCAB, 48)})
    there_and_back_twice(tmp_path, family, fresh_config=False)
    model = official_class(family).from_pretrained(tmp_path / "src").eval()
    ours = OURS.from_pretrained(tmp_path / "dst")
    assert not ours.config.tie_word_embeddings
    assert ours.model.decoder.embed_tokens.weight is ours.model.encoder.embed_tokens.weight
    assert_same_outputs(ours, model, inputs(family), spread=0.1)
    again = official_class(family).from_pretrained(tmp_path / "fresh").eval()
    assert again.config.tie_word_embeddings is False
    assert_same_outputs(ours, again, inputs(family), spread=0.1)


@pytest.mark.versions
@pytest.mark.parametrize(("family", "head"), [(f, None) for f in BARTS] + [("bart", "Model")], ids=str)
def test_nothing_is_tied(tmp_path, family, head):
    """Every stack and the head have matrices of their own, and nobody reads the shared one."""
    model = official_folder(tmp_path / "src", family, head, tie_word_embeddings=False)
    prefix = "" if head else "model."
    names = [prefix + name for name in ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")]
    assert len({stored(tmp_path / "src")[name][2] for name in names}) == 3
    there_and_back_twice(tmp_path, family)
    assert load_file(tmp_path / "dst" / UNUSED_FILE).keys() == {names[0]}
    ours = from_official(tmp_path / "src")
    assert not ours.config.share_embeddings
    assert not ours.config.tie_word_embeddings
    assert_same_outputs(ours, model, inputs(family), spread=0.1)
    anew, source = stored(tmp_path / "fresh"), stored(tmp_path / "src")
    assert anew == {**source, names[0]: source[names[1]]}  # a copy, where it is not known


@pytest.mark.parametrize("family", USUALLY_TWO)
def test_untied_copies_are_one_matrix(tmp_path, family):
    model = official_folder(tmp_path / "src", family, tie_word_embeddings=False)
    edit_tensors(tmp_path / "src", **dict.fromkeys((SHARED, ENCODER, DECODER), model.model.encoder.embed_tokens.weight))
    there_and_back_twice(tmp_path, family)
    ours = OURS.from_pretrained(tmp_path / "dst")
    assert ours.config.share_embeddings
    assert not ours.config.tie_word_embeddings
    assert stored(tmp_path / "fresh") == stored(tmp_path / "src")
    edit_tensors(tmp_path / "src", **{DECODER: None})
    with pytest.raises(ConversionError, match=r"model\.decoder\.embed_tokens\.weight must be stored"):
        convert(tmp_path / "src", tmp_path / "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tables_of_positions_in_old_checkpoints(tmp_path, dtype):
    model = official_model("marian").to(dtype)
    model.save_pretrained(tmp_path / "src")
    tables = {name: model.state_dict()[name] for name in TABLES}
    edit_tensors(tmp_path / "src", **tables)
    there_and_back_twice(tmp_path, "marian")
    assert load_file(tmp_path / "dst" / UNUSED_FILE).keys() == set(TABLES)
    assert not stored(tmp_path / "fresh").keys() & set(TABLES)
    edit_tensors(tmp_path / "src", **{TABLES[1]: tables[TABLES[1]].roll(1, 0)})
    with pytest.raises(ConversionError, match=r"model\.decoder\.embed_positions\.weight' is not the table of sines"):
        convert(tmp_path / "src", tmp_path / "other")
    with pytest.raises(ConversionError, match="is not the table of sines"):
        from_official(tmp_path / "src")


@pytest.mark.parametrize(
    "table",
    [torch.zeros(64, 48), torch.zeros(64), torch.zeros(64, 48, dtype=torch.long)],
    ids=["zeros", "one axis", "integers"],
)
def test_other_tables_of_positions_are_refused(tmp_path, table):
    official_folder(tmp_path / "src", "marian")
    edit_tensors(tmp_path / "src", **{TABLES[0]: table})
    with pytest.raises(ConversionError, match="is not the table of sines"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_interleaved_positions_are_refused(tmp_path):
    model = official_folder(tmp_path / "src", "marian")
    halves = model.model.encoder.embed_positions.weight
    edit_tensors(tmp_path / "src", **{TABLES[0]: torch.stack(halves.chunk(2, -1), -1).flatten(-2)})
    with pytest.raises(ConversionError, match="is not the table of sines"):
        convert(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("kept", ["positions", "spare"])
def test_what_is_kept_goes_back_only_where_it_still_fits(tmp_path, kept):
    src, dst = tmp_path / "src", tmp_path / "dst"
    model = official_folder(src, "marian", tie_word_embeddings=kept == "positions")
    if kept == "positions":
        edit_tensors(src, **{name: model.state_dict()[name] for name in TABLES})
    convert(src, dst, verify=False)
    ours = OURS.from_pretrained(dst)
    if kept == "positions":
        ours.config.max_position_embeddings = 80
    else:
        ours.resize_token_embeddings(VOCAB + 3)
    ours.save_pretrained(dst)
    assert_verified(convert(dst, tmp_path / "back", to_official=True))
    again, info = official_class("marian").from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    assert_same_outputs(ours, again.eval(), inputs("marian"), spread=0.1)


def test_a_changed_setting_leaves_what_is_kept(tmp_path):
    src, dst = tmp_path / "src", tmp_path / "dst"
    model = official_folder(src, "marian")
    edit_tensors(src, **{name: model.state_dict()[name] for name in TABLES})
    convert(src, dst, verify=False)
    ours = OURS.from_pretrained(dst)
    ours.config.hidden_dropout = 0.33
    ours.save_pretrained(dst)
    assert_verified(convert(dst, tmp_path / "back", to_official=True))
    assert stored(tmp_path / "back") == stored(src)
    assert entries_of(tmp_path / "back")["dropout"] == 0.33


@pytest.mark.parametrize("change", ["untied", "without bias"])
def test_a_model_that_has_become_another_is_written_anew(tmp_path, change):
    """Not in the form that it came in."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    official_folder(src, "bart")
    convert(src, dst, verify=False)
    ours = OURS.from_pretrained(dst)
    if change == "untied":
        ours.config.tie_word_embeddings = False
        ours.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 48))
    else:
        ours.config.lm_head_bias = False
        ours.logits_bias = None
    ours.save_pretrained(dst)
    assert_verified(convert(dst, tmp_path / "back", to_official=True))
    again = official_class("bart").from_pretrained(tmp_path / "back").eval()
    assert_same_outputs(ours, again, inputs("bart"), spread=0.1)
    names = stored(tmp_path / "back").keys()
    assert ("final_logits_bias" in names) == (change == "untied")
    assert ("lm_head.weight" in names) == (DECODER in names) == (change == "untied")


@pytest.mark.parametrize("family", USUALLY_TWO)
def test_a_cast_rounds_the_bias_of_the_logits_too(tmp_path, family):
    official_folder(tmp_path / "src", family)
    report = convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16")
    assert [measured.dtype for measured in report.parity.measured] == ["bfloat16", "float32"]
    assert {dtype for dtype, _, _ in stored(tmp_path / "dst").values()} == {"BF16"}


def test_no_padding_token(tmp_path):
    """Written -1 in old files; no generation setting may say so."""
    official_folder(tmp_path / "src", "bart")
    (tmp_path / "src" / "generation_config.json").unlink()
    edit_config(tmp_path / "src", pad_token_id=-1)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert_verified(report)
    assert any("the model has no padding token" in note for note in report.notes)
    assert from_official(tmp_path / "src").config.pad_token_id is None
    assert "pad_token_id" not in entries_of(tmp_path / "dst", "generation_config.json")


@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_without_a_bias_of_the_logits(tmp_path, family):
    official_folder(tmp_path / "src", family)
    edit_tensors(tmp_path / "src", final_logits_bias=None)
    there_and_back_twice(tmp_path, family)
    assert stored(tmp_path / "fresh") == stored(tmp_path / "src")
    ours = OURS.from_pretrained(tmp_path / "dst")
    assert not ours.config.lm_head_bias
    assert ours.logits_bias is None
    assert_same_outputs(
        ours, official_class(family).from_pretrained(tmp_path / "src").eval(), inputs(family), spread=0.1
    )


def test_what_the_first_checkpoints_hold(tmp_path):
    """Numbers that no class reads, settings that none knows, layers dropped in training."""
    official_folder(tmp_path / "src", "bart")
    numbers = {f"model.{stack}.version": torch.tensor([3.0]) for stack in ("encoder", "decoder")}
    edit_tensors(tmp_path / "src", **numbers)
    edit_config(tmp_path / "src", normalize_before=False, num_hidden_layers=1, encoder_layerdrop=0.1)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.notes == [
        "config.json: settings that bart does not use: 'encoder_layerdrop', 'normalize_before' "
        "('normalize_before': kept in config.json, for other libraries)",
    ]
    assert load_file(tmp_path / "dst" / UNUSED_FILE).keys() == numbers.keys()
    assert_verified(convert(tmp_path / "dst", tmp_path / "back", to_official=True))
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "src")
    ours = OURS.from_pretrained(tmp_path / "dst")
    ours.config.hidden_dropout = 0.33
    ours.save_pretrained(tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "changed", to_official=True, verify=False)
    changed = entries_of(tmp_path / "changed")
    assert (changed["encoder_layerdrop"], changed["normalize_before"], changed["dropout"]) == (0.1, False, 0.33)


@pytest.mark.parametrize("family", USUALLY_TWO)
@pytest.mark.parametrize("head", [None, "Model"])
def test_without_architectures_the_tensors_tell(tmp_path, family, head):
    official_folder(tmp_path / "src", family, head)
    edit_config(tmp_path / "src", architectures=...)
    wanted = "BlockformerEncoderDecoderModel" if head else OURS.__name__
    assert type(from_official(tmp_path / "src")).__name__ == wanted


# Text.


def ways_to_write():
    yield {"do_sample": False}
    yield {"do_sample": False, "no_repeat_ngram_size": 2}
    yield {"do_sample": True, "temperature": 1.5, "top_k": 40}
    yield {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
    yield {"num_beams": 4, "do_sample": False, "num_return_sequences": 3}
    yield {"num_beams": 4, "do_sample": False, "no_repeat_ngram_size": 2}


@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_the_same_text_in_every_way(tmp_path, family):
    official_folder(tmp_path / "src", family)
    theirs = official_class(family).from_pretrained(tmp_path / "src").eval()
    ours = from_official(tmp_path / "src")
    source = {name: inputs(family)[name] for name in ("input_ids", "attention_mask")}
    for settings in ways_to_write():
        text = same_text(ours, theirs, **source, max_new_tokens=20, **settings)
        plain = settings.keys() <= {"do_sample", "num_beams", "num_return_sequences"} and not settings["do_sample"]
        assert plain or len({tuple(row) for row in text.tolist()}) > 1, settings
    assistant = nudged(from_official(tmp_path / "src"))
    single = {name: tensor[:1] for name, tensor in source.items()}
    plain = theirs.generate(**single, max_new_tokens=20, do_sample=False, no_repeat_ngram_size=2)
    assisted = {"do_sample": False, "no_repeat_ngram_size": 2, "assistant_model": assistant}
    assert torch.equal(ours.generate(**single, max_new_tokens=20, **assisted), plain)


@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_settings_of_generation_in_config_json(tmp_path, family):
    """Old checkpoints have them there; transformers still reads them where there is no file of their own."""
    src = tmp_path / "src"
    official_folder(src, family)
    (src / "generation_config.json").unlink()
    edit_config(src, **GENERATION)
    theirs = official_class(family).from_pretrained(src).eval()
    assert theirs.generation_config.num_beams == 3
    there_and_back_twice(tmp_path, family)
    source = {name: inputs(family)[name] for name in ("input_ids", "attention_mask")}
    wanted = theirs.generate(**source)
    plain = theirs.generate(**source, num_beams=1, bad_words_ids=None, no_repeat_ngram_size=0, max_length=18)
    assert wanted.shape != plain.shape or not torch.equal(wanted, plain)
    models = {
        "converted": OURS.from_pretrained(tmp_path / "dst"),
        "in memory": from_official(src),
        "back": official_class(family).from_pretrained(tmp_path / "back").eval(),
        "back without memory": official_class(family).from_pretrained(tmp_path / "fresh").eval(),
    }
    for name, model in models.items():
        assert torch.equal(model.generate(**source), wanted), name
    found = entries_of(tmp_path / "dst", "generation_config.json")
    assert found == {**GENERATION, **BART_TOKENS[family], **found}
    assert not {"_from_model_config", "transformers_version"} & found.keys()
    assert "`num_beams` | 3" in (tmp_path / "dst" / "README.md").read_text().replace("| `", "`")


def test_a_file_of_generation_settings_comes_first(tmp_path):
    official_folder(tmp_path / "src", "bart")
    edit_config(tmp_path / "src", num_beams=4)
    (tmp_path / "src" / "generation_config.json").write_text('{"num_beams": 2, "decoder_start_token_id": 2}')
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    assert entries_of(tmp_path / "dst", "generation_config.json") == {"num_beams": 2, "decoder_start_token_id": 2}
    assert from_official(tmp_path / "src").generation_config.num_beams == 2


def test_settings_of_generation_that_transformers_refuses(tmp_path):
    official_folder(tmp_path / "src", "bart")
    (tmp_path / "src" / "generation_config.json").unlink()
    edit_config(tmp_path / "src", max_new_tokens=-5)
    with pytest.raises(ConversionError, match=r"config\.json: GenerationConfig refuses its settings of generation"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    with pytest.raises(ConversionError, match="GenerationConfig refuses"):
        from_official(tmp_path / "src")


def test_an_exported_folder_without_generation_settings_gets_the_token_ids(tmp_path):
    official_folder(tmp_path / "src", "bart")
    from_official(tmp_path / "src").save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "generation_config.json").unlink()
    export_folder(tmp_path / "ours", tmp_path / "repo")
    found = entries_of(tmp_path / "repo", "generation_config.json")
    assert (found["eos_token_id"], found["pad_token_id"], found["decoder_start_token_id"]) == (2, 1, 2)


# Training.


def labelled(family):
    """Labels [3, 12] with -100 at the end of a row, as a collator pads them."""
    labels = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(8))
    labels[:, 11], labels[1, 7:], labels[2, 10:] = BART_TOKENS[family]["eos_token_id"], -100, -100
    source = {name: inputs(family)[name] for name in ("input_ids", "attention_mask")}
    return {**source, "labels": labels}


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_loss_and_gradients(tmp_path, family):
    """Also where the target starts with each row's own last label (mBART)."""
    model = official_folder(tmp_path / "src", family, **DRY, init_std=0.15).train()  # more would multiply rounding
    ours = from_official(tmp_path / "src").train()
    batch = labelled(family)
    losses = [m(**batch).loss for m in (ours, model)]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    variant = FAMILIES[family].names.variant_of(model.config.to_dict())
    tensors = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    groups = FAMILIES[family].names.layout(variant, ours.config).plan(tensors)
    expected = dict(pair for group in groups for pair in group.apply(tensors.__getitem__))
    # The official row of padding learns from the head alone.
    rows = torch.arange(VOCAB) != BART_TOKENS[family]["pad_token_id"]
    for gradients in (found, expected):
        gradients["model.encoder.embed_tokens.weight"] = gradients["model.encoder.embed_tokens.weight"][rows]
    assert_gradients_close(found, expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 or name.endswith("k_proj.bias")


@pytest.mark.parametrize("family", USUALLY_TWO)
def test_steps_of_a_trainer(tmp_path, family):
    # Marian starts with the padding token, whose row the official class does not train where it is read.
    start = {"decoder_start_token_id": 3} if family == "marian" else {}
    official_folder(tmp_path / "src", family, **DRY, **start)
    theirs = official_class(family).from_pretrained(tmp_path / "src")
    ours = from_official(tmp_path / "src")
    batch = labelled(family)
    rows = []
    for row in range(3):
        labels = batch["labels"][row]
        rows.append({"input_ids": batch["input_ids"][row].tolist(), "labels": labels[labels != -100].tolist()})
    losses = []
    for model in (ours, theirs):
        arguments = Seq2SeqTrainingArguments(
            tmp_path / "run", max_steps=3, per_device_train_batch_size=3, learning_rate=1e-3, report_to=[],
            logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, optim="sgd", max_grad_norm=0,
        )  # fmt: skip

        def collate(features, model=model):
            pad = BART_TOKENS[family]["pad_token_id"]
            labels = [torch.tensor(feature["labels"]) for feature in features]
            padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
            ids = torch.tensor([feature["input_ids"] for feature in features])
            start = model.prepare_decoder_input_ids_from_labels(labels=padded)
            return {
                "input_ids": ids,
                "attention_mask": (ids != pad).long(),
                "labels": padded,
                "decoder_input_ids": start,
            }

        trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3
    assert_close(*losses)
    assert losses[0][0] != pytest.approx(losses[0][-1], rel=1e-3)


def shifter(**settings):
    small = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return OURS(blockformer.preset("mbart", **{**small, "intermediate_size": 16, **settings}))


@pytest.mark.parametrize("start", [None, 7])
def test_a_target_that_starts_with_its_last_label(start):
    """Whatever the start token of generation is, and whether labels are padded with -100 or with the padding token."""
    model = shifter(decoder_start_token_id=start)
    labels = torch.tensor([[5, 6, 2, 9], [5, 2, 8, -100], [4, 2, 1, 1], [3, -100, -100, -100]])
    wanted = [[9, 5, 6, 2], [8, 5, 2, 8], [2, 4, 2, 1], [3, 3, 1, 1]]
    before = labels.clone()
    assert model.shift_right(labels).tolist() == wanted
    assert torch.equal(labels, before)
    assert shift_tokens_around(labels, 1).tolist() == wanted
    assert model.prepare_decoder_input_ids_from_labels(labels=labels[:1]).tolist() == wanted[:1]


@pytest.mark.parametrize("labels", [[[-100, -100, -100]], [[1, 1, 1]]], ids=["ignored", "padding"])
def test_a_target_without_labels_starts_with_padding(labels):
    """Where the official function fails."""
    assert shifter().shift_right(torch.tensor(labels)).tolist() == [[1, 1, 1]]


def test_a_target_that_starts_with_the_start_token():
    model = shifter(decoder_starts_with_last_label=False, decoder_start_token_id=7)
    labels = torch.tensor([[5, 6, 2, 9], [5, 2, -100, -100]])
    assert model.shift_right(labels).tolist() == [[7, 5, 6, 2], [7, 5, 2, 1]]
    assert torch.equal(model.shift_right(labels), shift_tokens_right(labels, 1, 7))
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        shifter(decoder_starts_with_last_label=False).shift_right(labels)


# Settings.

CHANGES = [
    {"activation_function": "relu", "dropout": 0.25, "attention_dropout": 0.1, "activation_dropout": 0.2},
    {"scale_embedding": False, "use_cache": False, "init_std": 0.05, "decoder_layers": 5},
    {"scale_embedding": True, "max_position_embeddings": 512, "encoder_ffn_dim": 96, "decoder_ffn_dim": 64},
    {"dtype": "bfloat16", "problem_type": "regression", "decoder_start_token_id": 7, "bos_token_id": 9},
    {"num_labels": 2, "tie_word_embeddings": False, "eos_token_id": 11, "pad_token_id": 12},
]
CASES = [(family, change) for family in BARTS for change in CHANGES]
CASES += [(family, {"classifier_dropout": 0.5, "num_labels": 4}) for family in ("bart", "mbart")]
CASES += [("marian", OWN), ("marian", {**OWN, "tie_word_embeddings": False})]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_every_setting_there_and_back(family, changes):
    chosen = FAMILIES[family]
    entries = {
        "model_type": family,
        "architectures": [chosen.heads[0].official],
        **BART_SIZES,
        **BART_TOKENS[family],
        **changes,
    }
    config = chosen.settings.our_config(chosen.config_from(entries))
    again = type(config).from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    before = chosen.settings.official_class.from_dict(dict(entries)).to_dict()
    after = chosen.settings.official_class.from_dict(chosen.config_to(config)).to_dict()
    before["forced_eos_token_id"] = None
    assert {**after, "_name_or_path": ""} == {**before, "_name_or_path": ""}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("bart", {"norm_placement": "pre"}, "norm_placement must be 'post'"),
        ("mbart", {"norm_placement": "post"}, "norm_placement must be 'pre'"),
        ("bart", {"position_type": "sinusoidal_halves"}, "position_type must be 'learned'"),
        ("marian", {"position_type": "sinusoidal"}, "position_type must be 'sinusoidal_halves'"),
        ("bart", {"position_offset": 0}, "position_offset must be 2"),
        ("bart", {"embedding_norm": False}, "embedding_norm must be True"),
        ("bart", {"norm_eps": 1e-6}, "norm_eps must be 1e-05"),
        ("bart", {"norm_bias": False}, "norm_bias must be True"),
        ("bart", {"attention_bias": False}, "attention_bias must be True"),
        ("bart", {"embedding_scale": 2.0}, "embedding_scale must be 6.9"),
        ("bart", {"initializer_range": None}, "initializer_range must be set"),
        ("bart", {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ("bart", {"head_dim": 16}, "head_dim must be 12"),
        ("bart", {"share_embeddings": False}, "share_embeddings must be True"),
        ("bart", {"share_embeddings": False, "decoder_vocab_size": 50}, "decoder_vocab_size must be None"),
        ("bart", {"decoder_starts_with_last_label": True}, "decoder_starts_with_last_label must be False"),
        ("mbart", {"decoder_starts_with_last_label": False}, "decoder_starts_with_last_label must be True"),
        ("marian", {"classifier_dropout": 0.1}, "classifier_dropout must be None"),
        ("marian", {"decoder_start_token_id": None}, "decoder_start_token_id must be set"),
        ("bart", {"architectures": ["BlockformerDecoderForCausalLM"]}, "architectures must be one of"),
    ],
)
def test_what_a_family_cannot_express_is_named(family, changes, named):
    small = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    small |= {"pad_token_id": 0, "decoder_start_token_id": 0}
    config = blockformer.preset(family, **{**small, **changes})
    with pytest.raises(ConversionError, match=named):
        FAMILIES[family].config_to(config)
    (line,) = FAMILIES[family].differences(blockformer.preset("bert"))
    assert line == "model_type must be 'blockformer_encoder_decoder'"


def test_a_classification_head_on_a_marian_has_no_official_layout():
    small = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
    config = blockformer.preset("marian", **small, decoder_start_token_id=0)
    config.architectures = ["BlockformerEncoderDecoderForSequenceClassification"]
    with pytest.raises(ConversionError, match="architectures must be one of"):
        FAMILIES["marian"].config_to(config)


@pytest.mark.parametrize("family", BARTS)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads is 4 and decoder_attention_heads is 2"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"architectures": ["BartForMagic"]}, "BartForMagic"),
        ({"d_model": "wide"}, "config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_ours_cannot_express_is_named(tmp_path, family, changes, named):
    official_folder(tmp_path / "src", family)
    edit_config(tmp_path / "src", **changes)
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_the_family_follows_from_the_settings():
    small = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    small |= {"pad_token_id": 0, "decoder_start_token_id": 0}
    for name in (*BARTS, "t5", "umt5"):
        assert family_for(blockformer.preset(name, **small)).name == name
    own = blockformer.preset("marian", **small, share_embeddings=False, decoder_vocab_size=30)
    assert family_for(own).name == "marian"
    with pytest.raises(ConversionError, match="no official family can express this config"):
        family_for(blockformer.preset("transformer-base", **small))


def test_presets_become_official_and_come_back(tmp_path):
    small = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    small |= {"intermediate_size": 80, "max_position_embeddings": 64, "pad_token_id": 1, "decoder_start_token_id": 2}
    for family in BARTS:
        model = OURS(blockformer.preset(family, **small, initializer_range=0.3)).eval()
        folders = [tmp_path / family / name for name in ("ours", "official", "again")]
        model.save_pretrained(folders[0])
        assert convert(folders[0], folders[1], to_official=True).family == family
        assert_verified(convert(folders[1], folders[2]))
        assert stored(folders[2]) == stored(folders[0])


def test_the_axis_of_the_bias():
    op = LeadingAxis()
    (bias,) = op.forward([torch.arange(5.0)[None]])
    assert bias.tolist() == [0, 1, 2, 3, 4]
    assert op.inverse([bias])[0].shape == (1, 5)
    assert op.forward_shapes([(1, 5)]) == [(5,)]
    assert op.inverse_shapes([(5,)]) == [(1, 5)]
    for shape in ((2, 5), ()):
        with pytest.raises(ConversionError, match="no first axis of length 1"):
            op.forward_shapes([shape])


def test_a_bias_of_another_shape_is_refused(tmp_path):
    official_folder(tmp_path / "src", "bart")
    edit_tensors(tmp_path / "src", final_logits_bias=torch.zeros(VOCAB))
    with pytest.raises(ConversionError, match=r"final_logits_bias.*no first axis of length 1"):
        convert(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize(("family", "settings"), [("bart", {}), ("marian", OWN)], ids=str)
def test_inspecting_an_official_config(tmp_path, family, settings):
    model = official_folder(tmp_path / "src", family, decoder_layers=3, **settings)
    summary = summarize(tmp_path / "src")
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert summary.parameters == sum(p.numel() for p in learned)
    assert summary.cache["float32"] == 2 * 3 * 4 * 12 * 4


SCRIPT = r"""
import json, torch
from transformers import AutoModelForSeq2SeqLM
ids = torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
with torch.no_grad():
    logits = model(ids, decoder_input_ids=ids).logits
print(json.dumps({"logits": logits.tolist(), "text": model.generate(ids).tolist()}))
assert "blockformer" not in sys.modules
"""


@pytest.mark.versions
@pytest.mark.parametrize("family", USUALLY_TWO)
def test_a_converted_repo_where_blockformer_is_not(tmp_path, fresh, family):
    model = official_folder(tmp_path / "src", family, **(OWN if family == "marian" else {}))
    (tmp_path / "src" / "generation_config.json").unlink()
    beams = {} if family == "marian" else {"num_beams": 2}  # see the test of beams above
    edit_config(tmp_path / "src", max_length=15, bad_words_ids=[[54]], **beams)
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ids = inputs(family)["input_ids"][:1]
    found = json.loads(fresh(SCRIPT, tmp_path / "dst", json.dumps(ids.tolist()), folder=tmp_path))
    with torch.no_grad():
        wanted = model(ids, decoder_input_ids=ids).logits
    assert_close(torch.tensor(found["logits"]), wanted)
    assert found["text"] == official_class(family).from_pretrained(tmp_path / "src").generate(ids).tolist()


@pytest.mark.parametrize("family", USUALLY_TWO)
def test_the_bias_of_the_logits_does_not_learn(tmp_path, family):
    """The official class holds it as a buffer: no gradient, no weight decay, the same bits after training."""
    official_folder(tmp_path / "src", family)
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = OURS.from_pretrained(tmp_path / "dst").train()
    assert ours.config.lm_head_bias == "fixed"
    assert "logits_bias" in dict(ours.named_buffers())
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    optimizer = blockformer.adamw(ours, learning_rate=0.1, weight_decay=0.5)
    for return_logits in (True, False):
        tensors = inputs(family)
        ours(**tensors, labels=tensors["decoder_input_ids"], return_logits=return_logits).loss.backward()
        optimizer.step()
    after = ours.state_dict()
    assert [name for name in after if torch.equal(after[name], before[name])] == ["logits_bias"]
    ours.save_pretrained(tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back")["final_logits_bias"] == stored(tmp_path / "src")["final_logits_bias"]


def test_the_fixed_bias_grows_with_the_vocabulary():
    """By zeros, as the official classes do it."""
    ours = OURS(blockformer.preset("marian", **SMALL))
    ours.logits_bias.normal_()
    bias = ours.logits_bias.clone()
    ours.resize_token_embeddings(69)
    assert torch.equal(ours.logits_bias, torch.cat((bias, torch.zeros(5))))
    assert "logits_bias" in dict(ours.named_buffers())
    ours.resize_token_embeddings(60)
    assert torch.equal(ours.logits_bias, bias[:60])
    own = OURS(blockformer.preset("marian", **SMALL, decoder_vocab_size=30, share_embeddings=False))
    own.resize_decoder_token_embeddings(33)
    assert own(torch.ones(1, 3).long(), decoder_input_ids=torch.ones(1, 2).long()).logits.shape == (1, 2, 33)


def test_a_bias_that_has_learnt_goes_out_too(tmp_path):
    ours = OURS(blockformer.preset("bart", **SMALL, lm_head_bias=True))
    with torch.no_grad():
        ours.lm_head.bias.normal_()
    ours.save_pretrained(tmp_path / "src")
    assert_verified(convert(tmp_path / "src", tmp_path / "back", to_official=True))
    official = official_class("bart").from_pretrained(tmp_path / "back")
    assert torch.equal(official.final_logits_bias[0], ours.lm_head.bias)


def test_a_classifier_dropout_of_null_is_read():
    """A class with such a head cannot run it, but a language model has no use for it."""
    entries = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "classifier_dropout": None}
    assert FAMILIES["bart"].config_from(entries)["classifier_dropout"] is None
