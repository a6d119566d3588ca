"""Names and shapes: what doctor says of a checkpoint whose tensors are right and whose names are not, and mends."""

import json
import re

import pytest
import torch
import transformers
from pairs import assert_close

from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend
from blockformer.doctor.prefixes import unwrapped

from ..conversion.oracles import edit_config, edit_tensors, entries_of, fingerprint, official_folder, stored

LLAMA = {"tie_word_embeddings": False}
IDS = torch.arange(5, 25)[None]
OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def told(found):
    """The findings in one text, without that on the missing tokenizer."""
    lines = (f"{each.severity} {each.sentence} | {each.remedy}" for each in found.findings if each.kind != "tokenizer")
    return " ".join(" ".join(lines).split())


def renamed(change):
    return lambda folder: edit_tensors(folder, lambda all_: {change(name): each for name, each in all_.items()})


def prefixed(prefix):
    return renamed(lambda name: prefix + name)


def fused(folder):
    """As inference engines have them: queries, keys and values in one matrix, gate and up in another."""

    def change(all_):
        made = {}
        for name, each in all_.items():
            if "q_proj" in name:
                parts = [all_[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                made[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
            elif "gate_proj" in name:
                made[name.replace("gate_proj", "gate_up_proj")] = torch.cat([each, all_[name.replace("gate", "up")]])
            elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
                made[name] = each
        return made

    edit_tensors(folder, change)


def by_head(folder):
    """The rows of each key and value head side by side, as Megatron-LM has them."""
    heads = entries_of(folder)["num_key_value_heads"]

    def change(all_):
        made = {}
        for name, each in all_.items():
            parts = (
                [all_[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                if "q_pr" in name
                else []
            )
            if parts:
                joined = torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)
                made[name.replace("q_proj", "qkv_proj")] = joined
            elif not any(part in name for part in ("k_proj", "v_proj")):
                made[name] = each
        return made

    edit_tensors(folder, change)


def others_norms(name):
    return name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "ffn_norm")


BOTH_NORMS = ("attention_norm=input_layernorm", "ffn_norm=post_attention_layernorm")
CASES = {
    "of DDP": (prefixed("module."), "names begin with 'module.', which DistributedDataParallel or DeepSpeed", {}),
    "of torch.compile": (prefixed("_orig_mod."), "names of torch.compile: they have '_orig_mod.' in them", {}),
    "of FSDP": (renamed(lambda name: name.replace("layers.", "layers._fsdp_wrapped_module.")), "names of FSDP", {}),
    "of Lightning": (prefixed("model."), "names begin with 'model.', which a class around the model", {}),
    "of PEFT": (prefixed("base_model.model."), "names begin with 'base_model.model.', which PEFT puts there", {}),
    "of TRL": (prefixed("pretrained_model."), "which TRL's model with a value head puts there", {}),
    "of somebody's class": (prefixed("policy.actor."), "names begin with 'policy.actor.'", {}),
    "of several": (prefixed("module._orig_mod.model."), "names begin with 'module.model.'", {}),
    "joined": (
        fused,
        "queries, keys and values are one matrix in 4 tensors",
        {"qkv": "stacked", "gate_up": "gate-first"},
    ),
    "joined by head": (by_head, "queries, keys and values are one matrix in 4 tensors", {"qkv": "by-head"}),
    "others' norms": (renamed(others_norms), "'attention_norm' renamed to 'input_layernorm'", {"renames": BOTH_NORMS}),
    "a matrix too many": (
        lambda folder: edit_tensors(folder, **{"probe.weight": torch.randn(4, 4)}),
        "'probe.weight' left out",
        {"dropped": ("probe.weight",)},
    ),
    "other heads": (lambda folder: edit_config(folder, num_key_value_heads=4), '"num_key_value_heads": 2', {}),
    "other vocabulary": (
        lambda folder: edit_config(folder, vocab_size=90),
        "the tensors only fit if vocab_size is",
        {},
    ),
    "fewer layers": (
        lambda folder: edit_config(folder, num_hidden_layers=1, layer_types=...),
        "num_hidden_layers is 1",
        {},
    ),
    "class of torch.compile": (
        lambda folder: edit_config(folder, architectures=["OptimizedModule"]),
        "the tensors belong to LlamaForCausalLM",
        {},
    ),
    "class of FSDP": (
        lambda folder: edit_config(folder, architectures=["FSDPLlamaForCausalLM"]),
        "the tensors belong to LlamaForCausalLM",
        {},
    ),
    "stale 4 bits": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "the model was merged or dequantized",
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_and_mended(tmp_path, case):
    change, sentence, options = CASES[case]
    model = official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    wanted = stored(tmp_path / "source")
    change(tmp_path / "source")
    before = fingerprint(tmp_path / "source")
    found = mend(tmp_path / "source", tmp_path / "out", options=Options(**options))
    assert sentence in told(found)
    assert not found.is_healthy
    assert found.changes
    assert stored(tmp_path / "out") == wanted
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert_close(again(IDS).logits, model(IDS).logits, 0.0)
    assert diagnose(tmp_path / "out", quick=True).status == 0
    assert fingerprint(tmp_path / "source") == before


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("joined", r"say it with --qkv stacked or --qkv by-head"),
        ("others' norms", r"--rename attention_norm=\w+ or --rename attention_norm=\w+"),
        ("a matrix too many", r"if they can go: --drop NAME"),
    ],
)
def test_what_is_ambiguous_is_asked_for(tmp_path, case, remedy):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    CASES[case][0](tmp_path / "source")
    found = diagnose(tmp_path / "source")
    assert (found.is_mendable, found.status) == (False, 1)
    with pytest.raises(ConversionError, match=f"(?s)this must be settled first.*{remedy}"):
        mend(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_inner_part_of_a_model():
    known = {"model.embed.weight", "model.layers.0.weight", "lm_head.weight"}
    found = unwrapped(["embed.weight", "layers.0.weight", "lm_head.weight"], known)
    assert {*found.names} == known
    assert "only the inner part of the model was saved" in found.findings[0].sentence
    found = unwrapped(["net.embed.weight", "net.layers.0.weight", "lm_head.weight"], known)
    assert {*found.names} == known


def test_two_names_of_one_tensor():
    found = unwrapped(["module.a.weight", "module.b.weight", "a.weight"], {"a.weight", "b.weight"})
    assert [each.kind for each in found.findings] == ["twice", "prefix"]


def test_missing_tensors_are_listed_and_never_drawn(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    edit_tensors(tmp_path / "source", lambda all_: {n: each for n, each in all_.items() if "layers.1." not in n})
    found = diagnose(tmp_path / "source")
    assert "16 tensors of the model are missing: 'model.layers.1." in told(found)
    assert "transformers would draw them at random" in told(found)
    assert not found.is_mendable


def test_experts_as_a_model_in_memory_has_them_are_written_as_published(tmp_path):
    model = official_folder(
        tmp_path / "source", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    wanted = stored(tmp_path / "source")
    edit_tensors(tmp_path / "source", lambda _: model.state_dict())
    found = mend(tmp_path / "source", tmp_path / "out")
    assert "tensors are joined, as a model in memory has them; the released layout has" in told(found)
    assert "experts.0.gate_proj.weight" in told(found)
    assert stored(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [
        ("bert", "ForMaskedLM", "module."),
        ("gpt2", None, "_orig_mod."),
        ("t5", None, "model."),
        ("bart", None, "module."),
    ],
)
def test_other_topologies(tmp_path, family, name, prefix):
    official_folder(tmp_path / "source", family, name)
    wanted = stored(tmp_path / "source")
    assert diagnose(tmp_path / "source", quick=True).status == 0
    prefixed(prefix)(tmp_path / "source")
    found = mend(tmp_path / "source", tmp_path / "out")
    assert repr(prefix) in told(found)
    assert stored(tmp_path / "out") == wanted


def test_no_config(tmp_path):
    official_folder(tmp_path / "official", "qwen3", **LLAMA)
    official_folder(tmp_path / "source", "qwen3", seed=1, **LLAMA)
    wanted = stored(tmp_path / "source")
    (tmp_path / "source/config.json").unlink()
    prefixed("module.")(tmp_path / "source")
    found = diagnose(tmp_path / "source")
    assert "config.json is missing, and the tensors have the names of qwen3" in told(found)
    assert "'module.'" in told(found)
    assert not found.is_mendable
    found = mend(tmp_path / "source", tmp_path / "out", tmp_path / "official")
    assert "so the other checkpoint's is used" in told(found)
    assert stored(tmp_path / "out") == wanted
    assert entries_of(tmp_path / "out") == entries_of(tmp_path / "official")


@pytest.mark.parametrize("family", ["deberta-v2", "esm", "starcoder2", "bert"])
def test_the_family_of_weights_without_a_config(tmp_path, family):
    """Also where the official class has no defaults that make a model, and where norms have their names of 2018."""
    special = {"relative_attention": True} if family == "deberta-v2" else {"pad_token_id": 1} if family == "esm" else {}
    official_folder(tmp_path, family, type_vocab_size=2, **special)
    if family == "bert":
        renamed(lambda name: re.sub(r"LayerNorm\.(weight|bias)", lambda found: OLD_NORMS[found[0]], name))(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (finding,) = [each for each in diagnose(tmp_path).findings if each.kind == "config"]
    assert family in finding.names
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    assert 'write the "model_type" that it is' in told(diagnose(tmp_path))


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("deberta-v2", {"relative_attention": True, "conv_kernel_size": 3, "conv_act": "gelu"}, "conv_kernel_size"),
        ("gpt_neox", {"model_type": "gpt_neox_reward_model"}, "model_type 'gpt_neox_reward_model' is not supported"),
    ],
)
def test_a_model_that_is_not_converted_is_not_several(tmp_path, family, settings, said):
    official_folder(tmp_path, family, **{name: each for name, each in settings.items() if name != "model_type"})
    edit_config(tmp_path, **settings)
    found = diagnose(tmp_path)
    assert said in told(found)
    assert "the checkpoint is not at fault" in told(found)
    assert not any(each.kind == "several" for each in found.findings)


def test_a_teacher_next_to_its_student(tmp_path):
    official_folder(tmp_path, "llama", "LlamaForCausalLM", **LLAMA)
    edit_tensors(tmp_path, lambda all_: {f"{who}.{name}": each for name, each in all_.items() for who in ("a", "b")})
    said = "there are several models: 35 names that begin with 'a.' and 35 names that begin with 'b.'"
    assert said in told(diagnose(tmp_path))


def test_a_repo_of_ours_is_examined_too(tmp_path):
    from blockformer.conversion import convert

    official_folder(tmp_path / "official", "qwen3", **LLAMA)
    convert(tmp_path / "official", tmp_path / "source", verify=False)
    wanted = stored(tmp_path / "source")
    assert diagnose(tmp_path / "source", quick=True).status == 0
    prefixed("module.")(tmp_path / "source")
    found = mend(tmp_path / "source", tmp_path / "out")
    assert "'module.'" in told(found)
    assert stored(tmp_path / "out") == wanted


def test_wrong_options_are_named(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    for options, message in (
        ({"qkv": "rows"}, "--qkv must be one of stacked, by-head"),
        ({"gate_up": "both"}, "--gate-up must be one of"),
        ({"family": "qwen4"}, "Did you mean 'qwen3'"),
        ({"renames": ("a",)}, "--rename must be like OLD=NEW"),
        ({"renames": ("input_layernrm=a",)}, "did you mean 'input_layernorm'"),
        ({"dropped": ("model.norm.weigh",)}, r"did you mean model\.norm\.weight"),
        ({"dtype": "int3"}, "dtype must be one of"),
    ):
        with pytest.raises(ConversionError, match=message):
            diagnose(tmp_path / "source", options=Options(**options))
    with pytest.raises(ConversionError, match="no such folder"):
        diagnose(tmp_path / "nowhere")


def test_a_cast_is_written_into_the_config(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    mend(tmp_path / "source", tmp_path / "out", options=Options(dtype="bfloat16"))
    assert {dtype for dtype, _, _ in stored(tmp_path / "out").values()} == {"BF16"}
    assert entries_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "source/config.json").read_text())["dtype"] == "float32"


def test_weights_in_blocks_of_8_bits_are_left_as_they_are(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", attention_bias=False, mlp_bias=False, **LLAMA)

    def eight_bits(all_):
        made = {}
        for name, each in all_.items():
            if "_proj." not in name:
                made[name] = each.bfloat16()
                continue
            made[name] = (each / 0.01).clamp(-440, 440).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = torch.full([-(-size // 128) for size in each.shape], 0.01)
        return made

    edit_tensors(tmp_path / "source", eight_bits)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(tmp_path / "source", quantization_config=settings, dtype="bfloat16")
    found = diagnose(tmp_path / "source", quick=True)
    assert (told(found), found.family, found.status) == ("", "llama", 0)
    assert "LlamaForCausalLM in few bits" in found.what
    edit_config(tmp_path / "source", quantization_config={**settings, "quant_method": "bitnet"})
    found = diagnose(tmp_path / "source", quick=True)
    assert "Blockformer does not convert such models" in told(found)
    assert (found.status, found.is_mendable) == (3, False)
    edit_config(tmp_path / "source", quantization_config=...)
    assert "config.json has no quantization_config" in told(diagnose(tmp_path / "source", quick=True))
    edit_config(tmp_path / "source", quantization_config=settings, model_type="nonesuch")
    assert "model_type 'nonesuch' is not supported" in told(diagnose(tmp_path / "source", quick=True))


@pytest.mark.parametrize("entry", [{}, None, {"quant_method": "none"}])
def test_an_empty_quantization_config_is_none(tmp_path, entry):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **LLAMA)
    edit_config(tmp_path / "source", quantization_config=entry)
    assert diagnose(tmp_path / "source", quick=True).status == 0


@pytest.mark.parametrize(
    ("family", "head", "more"),
    [
        ("bert", "ForTokenClassification", {"bert.pooler.dense.weight": (64, 64), "bert.pooler.dense.bias": (64,)}),
        ("roberta", "ForMaskedLM", {"roberta.pooler.dense.weight": (64, 64), "roberta.pooler.dense.bias": (64,)}),
    ],
)
def test_what_converts_as_it_is_keeps_its_names(tmp_path, family, head, more):
    """As released: a pooler that the class does not read, and a buffer, both under the class's own prefix."""
    official_folder(tmp_path, family, head)
    size = entries_of(tmp_path)["hidden_size"]
    more = {name: torch.randn([size for _ in shape]) for name, shape in more.items()}
    more[f"{family}.embeddings.position_ids"] = torch.arange(32)[None]
    edit_tensors(tmp_path, lambda all_: {**all_, **more})
    found = diagnose(tmp_path)
    assert "error" not in told(found)
    assert "prefix" not in told(found)
    assert not found.changes


def test_a_language_model_without_its_prefix_is_no_fault(tmp_path):
    """GPT-2 as it was released."""
    official_folder(tmp_path, "gpt2", "LMHeadModel")
    edit_tensors(
        tmp_path,
        lambda all_: {name.removeprefix("transformer."): each for name, each in all_.items() if "lm" not in name},
    )
    assert "error" not in told(diagnose(tmp_path))
    assert not diagnose(tmp_path).changes


@pytest.mark.parametrize(("family", "head"), [("bert", "ForTokenClassification"), ("gpt2", "LMHeadModel")])
def test_a_foreign_tensor_is_all_that_is_wrong_with_a_file_as_released(tmp_path, family, head):
    """Of the names and buffers, which convert, nothing is said."""
    src = tmp_path / "source"
    official_folder(src, family, head)
    if family == "bert":
        edit_tensors(src, **{"bert.embeddings.position_ids": torch.arange(32)[None]})
    else:
        mask = torch.ones(64, 64).tril()[None, None]
        start = "transformer."
        edit_tensors(
            src,
            lambda all_: {name.removeprefix(start): each for name, each in all_.items() if "lm" not in name},
            **{f"h.{layer}.attn.bias": mask.clone() for layer in range(2)},
        )
    edit_tensors(src, **{"crf.transitions": torch.randn(5, 5)})
    found = diagnose(src, quick=True)
    (error,) = (each for each in found.findings if each.severity == "error")
    assert error.sentence == "1 tensor is not part of the model:\n  'crf.transitions'"
    assert "layout" not in told(found)
    mend(src, tmp_path / "out", options=Options(dropped=("crf.transitions",)))
    assert stored(tmp_path / "out").keys() == stored(src).keys() - {"crf.transitions"}


def test_a_file_with_more_heads_than_its_class(tmp_path):
    """BERT as it was released: both heads of its pre-training, and the class of one of them."""
    official_folder(tmp_path, "bert", "ForPreTraining")
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    assert "architectures" not in told(diagnose(tmp_path))
    edit_config(tmp_path, architectures=["BertForQuestionAnswering"])
    assert "architectures is [" in told(diagnose(tmp_path))
