"""Every family of encoders, a row of settings each: official checkpoint in, the same numbers, and back.

Those with older spellings of their checkpoints are in `test_bert_families.py`. `make test` takes the first row of each
family, `make exhaustive` all, and all heads.
"""

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from pairs import assert_close
from sizes import OFFICIAL_ENCODER

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families.registry import FAMILIES
from blockformer.inputs import inputs_of

from .oracles import assert_loads_as, assert_verified, edit_config, edit_tensors, entries_of, stored
from .outputs import assert_same_outputs
from .rows import Row, assert_there_and_back, family_of, model_of, parameters

SIZES = {**OFFICIAL_ENCODER, "vocab_size": 131, "type_vocab_size": 2}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEBERTA = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "max_relative_positions": -1,
}
ESM = {"token_dropout": True, "mask_token_id": 7, "pad_token_id": 1}
ROTARY_ESM = {**ESM, "position_embedding_type": "rotary"}
PEAKY = {"embed_init_std": 0.4, "init_std": 0.4}
ROWS = [
    Row("camembert"),
    Row("camembert", {"layer_norm_eps": 1e-3, **UNTIED}, shards=True),
    Row("data2vec-text"),
    Row("data2vec-text", {"pad_token_id": 3, **UNTIED}, shards=True),
    Row("xlm-roberta-xl"),
    Row("xlm-roberta-xl", {"num_attention_heads": 8, **UNTIED}, shards=True),
    Row("roberta-prelayernorm"),
    Row("roberta-prelayernorm", {"type_vocab_size": 1, **UNTIED}, shards=True),
    Row("megatron-bert", {"pad_token_id": 0}),
    Row("megatron-bert", {"hidden_act": "relu", **UNTIED}, shards=True),
    Row("ernie", {"use_task_id": True, "task_type_vocab_size": 3}),
    Row("ernie", {"use_task_id": False, **UNTIED}, shards=True),
    Row("electra", {"embedding_size": 24}),
    Row("electra", {"embedding_size": 32, **UNTIED}, shards=True),
    Row("electra", {"embedding_size": 48, "type_vocab_size": 3}),
    Row("albert", {"embedding_size": 24, "num_hidden_groups": 1}),
    Row("albert", {"embedding_size": 48, "num_hidden_layers": 4, "num_hidden_groups": 2, **UNTIED}, shards=True),
    Row("albert", {"embedding_size": 24, "num_hidden_groups": 2, "hidden_act": "relu"}),
    Row("roformer"),
    Row("roformer", {"embedding_size": 24, "num_attention_heads": 2, **UNTIED}, shards=True),
    Row("bert-generation"),
    Row("bert-generation", {"hidden_act": "relu", **UNTIED}, shards=True),
    Row("xlm", PEAKY),
    Row(
        "xlm",
        PEAKY | {"n_langs": 3, "use_lang_emb": False, "gelu_activation": False, "layer_norm_eps": 1e-3, **UNTIED},
        shards=True,
    ),
    Row("flaubert", PEAKY),
    Row("flaubert", PEAKY | {"pre_norm": True, "gelu_activation": False, **UNTIED}, shards=True),
    Row("squeezebert", {"embedding_size": 32, "initializer_range": 0.6}),
    Row("squeezebert", {"embedding_size": 32, "hidden_act": "relu", **UNTIED}, shards=True),
    Row("gte"),
    Row("gte", {"type_vocab_size": 0, "rope_parameters": YARN, **UNTIED}, shards=True),
    Row("nomic_bert"),
    Row("nomic_bert", {"hidden_act": "gelu", "rope_parameters": YARN}, shards=True),
    Row("jina_embeddings_v3"),
    Row("modernbert", {"local_attention": 8, "layer_types": [FULL, SLIDING]}),
    Row("modernbert", {"classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    Row("modernbert", {"local_attention": 8, "layer_types": [SLIDING, SLIDING], "decoder_bias": False, **UNTIED}, True),
    Row("modernbert", {"layer_types": [FULL, FULL], "classifier_bias": True}),
    Row("eurobert"),
    Row("eurobert", {"num_key_value_heads": 2, "head_dim": 16, "mlp_bias": True, "attention_bias": True}, shards=True),
    Row("eurobert", {"classifier_pooling": "bos", "rope_parameters": YARN, **TIED}),
    Row("eurobert", {"classifier_pooling": "mean"}),
    Row("deberta-v2", DEBERTA),
    Row("deberta-v2", {**DEBERTA, "position_buckets": 4, "max_relative_positions": 20, "type_vocab_size": 0}, True),
    Row("deberta-v2", {**DEBERTA, "position_buckets": 32, "hidden_act": "relu", "num_attention_heads": 2}),
    Row("mpnet"),
    Row("mpnet", {"hidden_act": "gelu", "layer_norm_eps": 1e-3, **UNTIED}, shards=True),
    Row("jina_embeddings_v3", {"type_vocab_size": 1, **UNTIED}, shards=True),
    Row("esm", ROTARY_ESM),
    Row("esm", {**ESM, "emb_layer_norm_before": True, **UNTIED}, shards=True),
    Row("esm", {**ROTARY_ESM, "token_dropout": False, "rope_theta": 500.0, "layer_norm_eps": 1e-3}),
]
MADE = {"esm": ("inv_freq", "contact_head.regression.weight", "contact_head.regression.bias")}
MADE |= {"roformer": ("encoder.embed_positions.weight",)}
"""Tensors that the official class makes where they are missing."""
FIRST = {row.family: row for row in reversed(ROWS)}
LENGTH = 20


def batch(ours, theirs, side="right"):
    """Two rows of tokens, the second padded on a side, for both models; positions if the official one takes them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, SIZES["vocab_size"], (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    gap = slice(0, 7) if side == "left" else slice(LENGTH - 7, LENGTH)
    ids[1, gap], mask[1, gap] = ours.config.pad_token_id, 0
    both = {"input_ids": ids, "attention_mask": mask}
    both |= {each.name: each.example(2, LENGTH, generator) for each in inputs_of(ours.config)[1:]}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = [{**both, "position_ids": positions}, dict(both)]
    if "position_ids" in inspect.signature(theirs.forward).parameters:
        inputs[1]["position_ids"] = positions + ours.config.position_offset
    if "MultipleChoice" in type(ours).__name__:
        inputs = [{name: tensor[None] for name, tensor in each.items() if "task" not in name} for each in inputs]
    return inputs


def official_of(row, head):
    """The official model of a row with a head, run as its family says."""
    theirs = model_of(row, SIZES, head, **({"is_decoder": True} if head.is_decoder else {}))
    return FAMILIES[row.family].oracle.prepared(theirs)


@torch.no_grad()
def assert_padding_changes_nothing(ours, theirs):
    """A padded row gives what it gives alone."""
    inputs, _ = batch(ours, theirs)
    alone = {name: tensor[1:, : LENGTH - 7] for name, tensor in inputs.items() if name != "attention_mask"}
    assert_close(ours(**inputs)[0][1:, : LENGTH - 7], ours(**alone)[0])


@pytest.mark.versions
@pytest.mark.parametrize("row", parameters(ROWS))
def test_there_and_back_with_the_same_numbers(tmp_path, row):
    head = next(head for head in family_of(row).heads if head.writes_text)
    theirs = official_of(row, head)
    names, state = FAMILIES[row.family].names.language_model, theirs.state_dict()
    if names.copy:  # without ties the official class reads the copy alone
        state[names.bias].copy_(state[names.copy])
    dst = assert_there_and_back(tmp_path, row, theirs, MADE.get(row.family, ()))
    ours = getattr(blockformer, head.ours).from_pretrained(dst)
    for side in ("left", "right"):
        assert_same_outputs(ours, theirs, *batch(ours, theirs, side), spread=0.3)
    assert_padding_changes_nothing(ours, theirs)


# Most heads do not depend on the axes in which the families differ.
USUALLY = ("albert", "deberta-v2", "electra", "mpnet", "modernbert", "eurobert")
HEADS = [
    pytest.param(row, head, marks=[] if family in USUALLY and not head.is_decoder else pytest.mark.exhaustive)
    for family, row in FIRST.items() if family in FAMILIES
    for head in FAMILIES[family].heads if head.ours != "BlockformerEncoderForMaskedLM"
]  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize(("row", "head"), HEADS, ids=lambda value: getattr(value, "official", ""))
def test_the_other_heads(tmp_path, row, head):
    theirs = official_of(row, head)
    if head.pooler == "needed" and not any("pooler" in name for name in theirs.state_dict()):
        pytest.skip("this release's class reads a pooler that it does not make")
    version = Version(transformers.__version__)
    if head.is_decoder and row.family == "megatron-bert" and Version("5.10") <= version < Version("5.11"):
        pytest.skip("transformers 5.10.4's decoders of Megatron-BERT see what comes later")
    if head.is_decoder:
        theirs.save_pretrained(tmp_path / "src")
    else:
        assert_there_and_back(tmp_path, row, theirs, MADE.get(row.family, ()))
    ours = blockformer.from_official(tmp_path / "src")
    assert type(ours).__name__ == head.ours
    assert_same_outputs(ours, theirs, *batch(ours, theirs), spread=0.1)


def assert_same_there_and_back(folder, theirs):
    """Of a checkpoint `src` that the official class has not written: the same outputs, tensors and settings."""
    convert(folder / "src", folder / "dst", verify=False)
    convert(folder / "dst", folder / "back", to_official=True, verify=False)
    assert stored(folder / "back") == stored(folder / "src")
    assert entries_of(folder / "back") == entries_of(folder / "src")
    ours = blockformer.from_official(folder / "src")
    assert_same_outputs(ours, theirs, *batch(ours, theirs), spread=0.1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["xlm", "flaubert"])
def test_token_types_add_the_vectors_of_tokens(tmp_path, family):
    head = next(head for head in FAMILIES[family].heads if head.writes_text)
    theirs = official_of(FIRST[family], head)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    for types in (torch.zeros_like(ids), ids.flip(1)):
        logits = ours(ids, token_type_ids=types).logits
        assert_close(logits, theirs(ids, token_type_ids=types).logits)
        assert (logits - ours(ids).logits).abs().max() > 1e-2
    labels = ids.masked_fill(ids < 40, -100)
    assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


@pytest.mark.parametrize(
    ("family", "entries", "told"),
    [
        ("xlm", {"n_langs": 3}, "n_langs is '3': with use_lang_emb"),
        ("xlm", {"asm": True}, "asm is 'True'"),
        ("flaubert", {"causal": True}, "causal is 'True'"),
        ("flaubert", {"summary_type": "mean"}, "summary_type is 'mean'"),
        ("xlm", {"architectures": ["XLMForQuestionAnswering"]}, "the best pairs of a start and an end"),
        ("flaubert", {"architectures": ["FlaubertForMultipleChoice"]}, "it scores a choice in two layers"),
        ("squeezebert", {"q_groups": 2}, "q_groups is '2'"),
        ("squeezebert", {"layer_norm_eps": 1e-5}, "layer_norm_eps is '1e-05'"),
    ],
)
def test_settings_and_heads_that_ours_lack_are_refused(tmp_path, family, entries, told):
    head = next(head for head in family_of(FIRST[family]).heads if head.writes_text)
    official_of(FIRST[family], head).save_pretrained(tmp_path / "src")
    edit_config(tmp_path / "src", **entries)
    with pytest.raises(ConversionError, match=told):
        convert(tmp_path / "src", tmp_path / "dst", verify=False)


def test_trained_matrices_of_blocks_go_out_as_whole_ones(tmp_path):
    row = FIRST["squeezebert"]
    head = next(head for head in family_of(row).heads if head.writes_text)
    official_of(row, head).save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    edit_tensors(tmp_path / "repo", lambda tensors: {name: tensor + 0.01 for name, tensor in tensors.items()})
    with pytest.raises(ConversionError, match=r"not zero outside of its 4 blocks.*such as bert"):
        convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert_verified(convert(tmp_path / "repo", tmp_path / "bert", to_official=True, family="bert"))


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["Model", "ForTokenClassification"])
def test_gte_under_the_prefix_of_its_first_checkpoints(tmp_path, kind):
    row = FIRST["gte"]
    theirs = model_of(row, SIZES, next(head for head in family_of(row).heads if head.official == f"Gte{kind}"))
    theirs.save_pretrained(tmp_path / "src")
    root = "" if kind == "Model" else "gte."
    edit_tensors(
        tmp_path / "src",
        lambda tensors: {
            name if name.startswith("classifier.") else "new." + name.removeprefix(root): tensor
            for name, tensor in tensors.items()
        },
    )
    assert_loads_as(tmp_path / "src", theirs)
    assert_same_there_and_back(tmp_path, theirs)


OWN_GTE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "model_type": "new",
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
"""The entries of GTE's own code."""


def own_gte(folder, kind, **entries):
    """A checkpoint of GTE's own code in `src`, and the official model that it was made from."""
    row = FIRST["gte"]
    theirs = model_of(row, SIZES, next(head for head in family_of(row).heads if head.official == f"Gte{kind}"))
    theirs.save_pretrained(folder / "src")
    edit_tensors(
        folder / "src",
        lambda tensors: {
            name if name.startswith(("classifier.", "lm_head.")) else "new." + name.removeprefix("gte."): tensor
            for name, tensor in tensors.items()
        },
    )
    edit_config(folder / "src", rope_parameters=..., **{"architectures": [f"New{kind}"], **OWN_GTE, **entries})
    return theirs


def turn_by(theirs, base, slower=1.0):
    """Let the heads of an official model turn by a base, each pair slower by a factor."""
    size = theirs.config.hidden_size // theirs.config.num_attention_heads
    turns = base ** -(torch.arange(0, size, 2) / size) / slower
    getattr(theirs, "gte", theirs).rotary_emb.inv_freq.copy_(turns)


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("factor", [None, 8.0])
def test_gte_with_its_own_code(tmp_path, kind, factor):
    scaling = None if factor is None else {"factor": factor, "type": "ntk"}
    theirs = own_gte(tmp_path, kind, rope_scaling=scaling)
    if factor is None:
        turn_by(theirs, 20_000.0)
    else:  # a larger base, and each of the four pairs of a head slower by the fourth root
        turn_by(theirs, 20_000.0 * factor, factor**0.25)
    assert_same_there_and_back(tmp_path, theirs)


def test_gte_with_its_own_code_and_no_base(tmp_path):
    theirs = own_gte(tmp_path, "Model", rope_scaling=None, rope_theta=...)
    turn_by(theirs, 10_000.0)
    assert_same_there_and_back(tmp_path, theirs)


@pytest.mark.parametrize("today", [None, {"rope_type": "default", "rope_theta": 500.0}])
def test_gte_s_rope_scaling_counts_before_its_rope_parameters(tmp_path, today):
    row = FIRST["gte"]
    theirs = model_of(row, SIZES, next(head for head in family_of(row).heads if head.official == "GteModel"))
    theirs.save_pretrained(tmp_path / "src")
    scaling = {"rope_type": "linear", "factor": 4.0}
    edit_config(tmp_path / "src", rope_parameters=today, rope_scaling=scaling, rope_theta=300.0)
    theirs = type(theirs).from_pretrained(tmp_path / "src")
    assert theirs.config.rope_parameters == {**scaling, "rope_theta": 300.0}
    assert_same_there_and_back(tmp_path, theirs)


@pytest.mark.parametrize("named", [["NewModel", "NewForTokenClassification"], ["NewModel"]])
def test_gte_with_a_head_beyond_its_first_architecture(tmp_path, named):
    theirs = own_gte(tmp_path, "ForTokenClassification", rope_scaling=None, architectures=named)
    turn_by(theirs, 20_000.0)
    assert_same_there_and_back(tmp_path, theirs if len(named) == 2 else theirs.gte)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"logn_attention_scale": True}, "logn_attention_scale is 'True'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ({"pack_qkv": False}, "pack_qkv is 'False'"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "mixed_b '0.6', which Blockformer does not"),
        ({"rope_scaling": {"type": "ntk"}}, "factor must be a positive number, not 'None'"),
        ({"architectures": ["NewForMultipleChoice"]}, "NewForMultipleChoice.*there are GteModel"),
        ({"architectures": ["NewForMaskedLM", "NewForTokenClassification"]}, "architectures is .* cannot be converted"),
    ],
)
def test_gte_refuses_what_only_its_own_code_has(tmp_path, entries, told):
    own_gte(tmp_path, "Model", **{"rope_scaling": None, **entries})
    with pytest.raises(ConversionError, match=told):
        convert(tmp_path / "src", tmp_path / "dst", verify=False)
    assert not (tmp_path / "dst").exists()


@pytest.mark.versions
def test_nomic_under_the_names_of_its_first_configs(tmp_path):
    row = Row("nomic_bert", {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "intermediate_size": 40})
    theirs = model_of(row, SIZES, family_of(row).heads[0])
    theirs.save_pretrained(tmp_path / "src")
    entries = entries_of(tmp_path / "src")
    family = FAMILIES["nomic_bert"]
    former = {name: entries[new] for name, new in family.settings.former.names().items() if new in entries}
    former |= {"activation_function": "geglu", "rotary_emb_base": entries["rope_parameters"]["rope_theta"]}
    gone = dict.fromkeys((*family.settings.former.names().values(), "rope_parameters"), ...)
    edit_config(tmp_path / "src", **gone, **former, prenorm=False, rotary_emb_fraction=1.0, use_flash_attn=True)
    assert_same_there_and_back(tmp_path, theirs)
    edit_config(tmp_path / "src", prenorm=True)
    with pytest.raises(ConversionError, match="prenorm is 'True'"):
        convert(tmp_path / "src", tmp_path / "other", verify=False)


def protein_model(kind="ForMaskedLM", **settings):
    row = Row("esm", {**ROTARY_ESM, **settings})
    return model_of(row, SIZES, next(head for head in family_of(row).heads if head.official == f"Esm{kind}"))


@pytest.mark.parametrize("positions", ["rotary", "absolute"])
@torch.no_grad()
def test_masked_tokens_are_dropped_and_the_others_scaled(tmp_path, positions):
    theirs = protein_model(position_embedding_type=positions)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    given, _ = batch(ours, theirs)
    plain = ours(**given).logits
    given["input_ids"][:, 2:8:2] = 7
    real = given["attention_mask"].bool()
    named = {name: given[name] for name in ("input_ids", "attention_mask")}
    assert_close(ours(**given).logits[real], theirs(**named).logits[real])
    assert_close(ours(given["input_ids"][:1]).logits, theirs(given["input_ids"][:1]).logits)
    assert not torch.allclose(ours(**given).logits[real], plain[real], atol=1e-3)
    holding_padding = given["input_ids"][:1].clone()
    holding_padding[:, 4] = 1  # which ESM-1b does not count among the positions
    assert_close(ours(holding_padding).logits, theirs(holding_padding).logits)
    ours.prepare_for_inference()
    assert_close(ours(holding_padding).logits, theirs(holding_padding).logits)
    assert_close(ours(**given).logits[real], theirs(**named).logits[real])


@pytest.mark.parametrize("mask", [None, torch.ones(2, LENGTH, dtype=torch.long)], ids=["no mask", "a full mask"])
@pytest.mark.parametrize("positions", ["rotary", "absolute"])
@torch.no_grad()
def test_padding_that_no_mask_hides_has_no_place(tmp_path, positions, mask):
    theirs = protein_model(position_embedding_type=positions)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ids = batch(ours, theirs)[0]["input_ids"]
    ids[:, 2], ids[:, 5] = theirs.config.pad_token_id, 7
    given = {"input_ids": ids, "attention_mask": mask}
    assert_close(ours(**given).logits, theirs(**given).logits)
    ours.prepare_for_inference()
    assert_close(ours(**given).logits, theirs(**given).logits)


@torch.no_grad()
def test_texts_in_one_row_are_scaled_each_by_itself(tmp_path):
    theirs = protein_model()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ids = batch(ours, theirs)[0]["input_ids"][:1]
    ids[:, 3:6] = 7
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    packed = ours(ids, position_ids=positions).logits
    assert_close(packed, torch.cat([ours(part).logits for part in ids.split((8, 12), dim=1)], dim=1))
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    assert_close(ours(ids, cu_seq_lens_q=starts).logits, packed)
    everything = torch.full_like(ids, 7)
    assert ours(everything).logits.isfinite().all()


@pytest.mark.parametrize(("names", "dtype"), [("once", "float16"), ("by layer", "float16"), ("once", "bfloat16")])
@torch.no_grad()
def test_frequencies_that_were_rounded_in_training_stay_so(tmp_path, names, dtype):
    theirs = protein_model()
    rounded = theirs.esm.rotary_embeddings.inv_freq.to(getattr(torch, dtype)).float()
    theirs.esm.rotary_embeddings.inv_freq.copy_(rounded)
    theirs.save_pretrained(tmp_path / "src")
    found = {name: ... for name in stored(tmp_path / "src") if name.endswith("inv_freq")}
    assert len(found) == 1
    root = "esm.encoder.layer"
    new = [f"{root}.{layer}.attention.self.rotary_embeddings.inv_freq" for layer in range(2)]
    new = ["esm.rotary_embeddings.inv_freq"] if names == "once" else new
    edit_tensors(tmp_path / "src", **dict.fromkeys(found, None) | dict.fromkeys(new, rounded))
    loaded = type(theirs).from_pretrained(tmp_path / "src")
    assert torch.equal(loaded.esm.rotary_embeddings.inv_freq, rounded)
    assert_same_there_and_back(tmp_path, theirs)
    ours = blockformer.from_official(tmp_path / "src")
    assert ours.config.frequency_dtype == dtype
    ids = torch.randint(8, 100, (1, 40))
    assert_close(ours(ids).logits, theirs(ids).logits)
    edit_tensors(tmp_path / "src", **dict.fromkeys(new, rounded * 1.01))
    with pytest.raises(ConversionError, match=r"not the frequencies of rope_theta 10000\.0 and heads of 8 channels"):
        convert(tmp_path / "src", tmp_path / "other")


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"is_folding_model": True}, "is_folding_model is 'True'"),
        ({"is_decoder": True}, "is_decoder is true, and 'esm' is only converted as an encoder"),
        ({"mask_token_id": None}, "token_dropout=0.12 with mask_token_id=None: it needs mask_token_id"),
        ({"mask_token_id": 500}, "mask_token_id must be a token from 0 to 130, not 500"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_protein_models_that_ours_cannot_be_are_refused(tmp_path, entries, told):
    protein_model().save_pretrained(tmp_path / "src")
    edit_config(tmp_path / "src", **entries)
    with pytest.raises(ConversionError, match=told):
        convert(tmp_path / "src", tmp_path / "dst", verify=False)


@pytest.mark.parametrize("settings", [{"token_dropout": 0.1}, {"token_dropout": 0, "mask_token_id": 3}])
def test_token_dropout_without_its_token_or_share_is_refused(settings):
    with pytest.raises(ValueError, match="it needs mask_token_id and a share above 0 and below 1"):
        blockformer.BlockformerEncoderConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"frequency_dtype": "int8"}, "frequency_dtype must be one of float16, bfloat16"),
        ({"frequency_dtype": "float16", "position_type": "learned"}, "needs position_type='rotary'"),
        ({"frequency_dtype": "float16", "rope_parameters": YARN}, "needs rope_type 'default'"),
    ],
)
def test_frequencies_that_cannot_be_rounded_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        blockformer.BlockformerEncoderConfig(**settings)
