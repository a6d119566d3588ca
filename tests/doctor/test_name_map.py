"""Files of names: weights under a stranger's names become a family's, or everything that is wrong is said at once."""

import json

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_file

from blockformer.cli import main
from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend

from ..conversion.oracles import entries_of, official_folder, stored

IDS = torch.arange(5, 25)[None]
LAYER = "model.layers.{layer}."
PARTS = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
LLAMA = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": 16}
NAMES = [
    ["tok", "model.embed_tokens.weight", {"scale": 0.5}],
    ["blocks.{layer}.qkv", PARTS, "split", {"each": ["pairs-to-halves", "pairs-to-halves", None]}],
    ["blocks.{layer}.out", f"{LAYER}self_attn.o_proj.weight"],
    [["blocks.{layer}.gate", "blocks.{layer}.up"], [f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up")]],
    ["blocks.{layer}.down", f"{LAYER}mlp.down_proj.weight", "transpose"],
    ["blocks.{layer}.norm1", f"{LAYER}input_layernorm.weight", "squeeze"],
    ["blocks.{layer}.norm2", f"{LAYER}post_attention_layernorm.weight", {"add": 1}],
    ["norm", "model.norm.weight"],
    ["head", "lm_head.weight"],
]


def pairs(weight, size=16):
    """Rows whose rotated pairs are halves of each head -> rows whose pairs lie side by side."""
    return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def strangers(all_):
    """A Llama's tensors as a stranger's code has them."""
    made = {"tok": all_["model.embed_tokens.weight"] * 2, "norm": all_["model.norm.weight"]}
    made["head"] = all_["lm_head.weight"]
    for layer in (0, 1):
        of, to = f"model.layers.{layer}.", f"blocks.{layer}."
        q, k, v = (all_[f"{of}self_attn.{part}_proj.weight"] for part in "qkv")
        made[f"{to}qkv"] = torch.cat([pairs(q), pairs(k), v])
        made[f"{to}out"] = all_[f"{of}self_attn.o_proj.weight"]
        made |= {f"{to}{part}": all_[f"{of}mlp.{part}_proj.weight"] for part in ("gate", "up")}
        made[f"{to}down"] = all_[f"{of}mlp.down_proj.weight"].T.contiguous()
        made[f"{to}norm1"] = all_[f"{of}input_layernorm.weight"][None, None]
        made[f"{to}norm2"] = all_[f"{of}post_attention_layernorm.weight"] - 1
    return made


def write_map(path, tensors, config, **more):
    path.write_text(json.dumps({"config": config, "tensors": tensors, **more}))
    return str(path)


@pytest.fixture
def llama(tmp_path):
    """The official model, a stranger's file of its weights, and what its config would be."""
    model = official_folder(tmp_path / "official", "llama", "LlamaForCausalLM", **LLAMA)
    weights = strangers(load_file(tmp_path / "official/model.safetensors"))
    torch.save({"model": {f"_orig_mod.{name}": each for name, each in weights.items()}, "step": 7}, tmp_path / "w.pt")
    config = {name: each for name, each in entries_of(tmp_path / "official").items() if name != "architectures"}
    return model, tmp_path / "w.pt", config


@torch.no_grad()
def test_a_strangers_decoder(tmp_path, llama):
    model, weights, config = llama
    names = write_map(tmp_path / "names.json", NAMES, config)
    save_file({"input_ids": IDS, "logits": model(IDS).logits}, tmp_path / "logits.safetensors")
    options = Options(names=names, check=str(tmp_path / "logits.safetensors"))
    found = diagnose(weights, options=options)
    assert (found.family, found.is_mendable, found.status) == ("llama", True, 1)  # the names begin with _orig_mod
    assert any(f"{names} makes a LlamaForCausalLM of them" in each.sentence for each in found.findings)
    found = mend(weights, tmp_path / "out", options=options)
    assert any("logits of LlamaForCausalLM differ by" in change for change in found.changes)
    wanted, got = stored(tmp_path / "official"), stored(tmp_path / "out")
    assert {name for name in wanted if wanted[name] != got[name]} <= {n for n in wanted if "post_attention" in n}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(again(IDS).logits, model(IDS).logits, 1e-5)
    assert entries_of(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]
    assert not (tmp_path / "out/names.json").exists()
    assert diagnose(tmp_path / "out", quick=True).status == 0


@torch.no_grad()
def test_other_logits_are_refused(tmp_path, llama):
    model, weights, config = llama
    wrong = [[*each[:2], "split"] if "qkv" in str(each[0]) else each for each in NAMES]
    names = write_map(tmp_path / "names.json", wrong, config)
    check = tmp_path / "logits.safetensors"
    save_file({"input_ids": IDS, "logits": model(IDS).logits}, check)
    with pytest.raises(ConversionError, match=r"logits of LlamaForCausalLM differ by .*: it is not the same model"):
        mend(weights, tmp_path / "out", options=Options(names=names, check=str(check)))
    assert not (tmp_path / "out").exists()
    for given, message in (
        ({"input_ids": IDS}, "needs input_ids"),
        ({"input_ids": IDS, "logits": torch.zeros(1, 3, 4)}, r"logits are \[1, 3, 4\], but LlamaForCausalLM computes"),
    ):
        save_file(given, check)
        with pytest.raises(ConversionError, match=message):
            mend(weights, tmp_path / "out", options=Options(names=names, check=str(check)))


def test_everything_that_is_wrong_is_said_at_once(tmp_path, llama):
    _, weights, config = llama
    wrong = [
        *NAMES[2:-1],
        ["blocks.{layer}.qkv", PARTS, "spilt"],
        ["blocks.{layer}.out", f"{LAYER}self_attn.out.weight"],
        ["tok", "model.embed_tokens.weight", "transpose"],
        [["head", "head_bias"], "lm_head.weight", "join"],
        ["rope", "model.rope"],
        [[], "model.layers.{layer}.self_attn.q_proj.bias", {"constant": 0}],
        [[], "model.norm.weight"],
        ["norm"],
    ]
    names = write_map(tmp_path / "names.json", wrong, config, drop=["freqs"])
    with pytest.raises(ConversionError) as caught:
        diagnose(weights, options=Options(names=names))
    said = " ".join(str(caught.value).split())
    for line in (
        f"{names} does not make a whole model of the tensors:",
        "unknown operations (1): 'blocks.{layer}.qkv': unknown operation 'spilt'; there are transpose, squeeze, split",
        "tensors that no entry takes (2): 'blocks.0.qkv'",
        "tensors that several entries take (2): 'blocks.0.out': blocks.{layer}.out, blocks.{layer}.out",
        "parts that are missing (1): 'head': needs 'head_bias'",
        "entries whose tensors are not there (2): 'rope' drop 'freqs'",
        "names that the family's model does not have",
        "'model.layers.0.self_attn.out.weight' (from 'blocks.{layer}.out')",
        "'model.layers.{layer}.self_attn.q_proj.bias'",
        "wrong shapes (1): 'model.embed_tokens.weight' is [64, 199], the model's is [199, 64]",
        "entries that are not [FROM, TO, OPERATION ...] (2)",
        "tensors of the model that nothing fills",
        "'model.layers.1.self_attn.k_proj.weight'",
    ):
        assert line in said
    write_map(tmp_path / "names.json", wrong, {**config, "num_attention_heads": 7})
    with pytest.raises(ConversionError, match=r"(?s)unknown operations.*the config of the family's model"):
        diagnose(weights, options=Options(names=names))
    write_map(tmp_path / "names.json", NAMES, {})
    with pytest.raises(ConversionError, match="model_type is missing"):
        diagnose(weights, options=Options(names=names))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ({"split": {"groups": 5}}, "split: parts of 64 do not lie in 5 equal groups"),
        ({"split": {"rows": 5}}, "split takes axis, groups"),
        ({"split": {"axis": -1}}, "axis must be a whole number"),
        ({"scale": "half"}, "scale needs a number"),
        ({"transpose": 1}, "transpose takes no argument"),
        ({"pairs-to-halves": {"head_dim": 24}}, r"does not hold heads of 24 rows"),
        ({"pairs-to-halves": {"rotated": 3}}, "rotated must be even"),
        ({"each": [None, None]}, "each needs a list of 1"),
        ("unstack", "does not hold 3 tensors"),
    ],
)
def test_operations_that_do_not_apply(tmp_path, llama, operation, message):
    _, weights, config = llama
    names = write_map(tmp_path / "names.json", [["blocks.{layer}.qkv", PARTS, operation], *NAMES[2:]], config)
    with pytest.raises(ConversionError, match=f"(?s)operations that do not apply \\(2\\).*'blocks.0.qkv': .*{message}"):
        diagnose(weights, options=Options(names=names))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_stacked_and_taken_apart(tmp_path, family):
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    official_folder(tmp_path / "official", family, tie_word_embeddings=False, **sizes)
    wanted = stored(tmp_path / "official")
    tensors, same = load_file(tmp_path / "official/model.safetensors"), []
    theirs, entries = {}, []
    for name, each in tensors.items():
        pattern = name.replace(".0.", ".{layer}.", 1).replace(".1.", ".{layer}.", 1)
        if ".experts." not in name:
            theirs[f"own.{name}"] = each
            same.append([f"own.{pattern}", pattern])
        elif family == "gpt_oss":
            theirs |= {f"own.{name}.{number}": part.clone() for number, part in enumerate(each)}
            entries.append([f"own.{pattern}.{{expert}}", pattern, "stack"])
        elif ".experts.0." in name:
            parts = [tensors[name.replace(".experts.0.", f".experts.{number}.")] for number in range(4)]
            theirs[f"own.{name}"] = torch.stack(parts)
            of = pattern.replace("layers.{layer}.mlp.experts.{layer}", "layers.{layer}.mlp.experts.0")
            entries.append([f"own.{of}", of.replace(".experts.0.", ".experts.{expert}."), "unstack"])
    unique = {json.dumps(entry): entry for entry in (*same, *entries)}
    save_file(theirs, tmp_path / "own.safetensors")
    names = write_map(tmp_path / "names.json", [*unique.values()], entries_of(tmp_path / "official"))
    mend(tmp_path / "own.safetensors", tmp_path / "out", options=Options(names=names))
    assert stored(tmp_path / "out") == wanted


@torch.no_grad()
def test_biases_that_a_code_does_without_are_zero(tmp_path):
    model = official_folder(tmp_path / "official", "gpt2")
    state = model.state_dict()
    biases = {name for name in state if name.endswith(".bias")}
    for name in biases:
        state[name].zero_()
    kept = {name: each.clone() for name, each in state.items() if name not in biases and "lm_head" not in name}
    torch.save({"state_dict": kept}, tmp_path / "own.ckpt")
    patterns = {name.replace(".0.", ".{n}.").replace(".1.", ".{n}.") for name in {*kept, *biases}}
    entries = [[[], each, {"constant": 0}] if each.endswith(".bias") else [each, each] for each in sorted(patterns)]
    names = write_map(tmp_path / "names.json", entries, entries_of(tmp_path / "official"))
    mend(tmp_path / "own.ckpt", tmp_path / "out", options=Options(names=names))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(again(IDS).logits, model(IDS).logits, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tensor": []}, "unknown 'tensor'; there are config, tensors, drop"),
        ({"config": []}, "config must be an object"),
        ({"config": {}, "tensors": {}}, "tensors must be a list of"),
        ({"config": {}, "tensors": [["a", "b"]], "drop": "a"}, "drop must be a list of names"),
        ({"config": {}, "tensors": [["a.{n}", "b.{m}"]]}, "each side has a placeholder that the other lacks"),
    ],
)
def test_files_that_are_not_of_names(tmp_path, llama, content, message):
    (tmp_path / "names.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=message):
        diagnose(llama[1], options=Options(names=str(tmp_path / "names.json")))


def test_the_command(tmp_path, llama, capsys):
    _, weights, config = llama
    names = write_map(tmp_path / "names.json", NAMES, config)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(weights), "--map", names, "--check", "logits.safetensors"])
    assert ended.value.code
    assert "--check needs --mend" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", str(weights), "--map", names, "--mend", str(tmp_path / "out")])
    assert "written as LlamaForCausalLM" in " ".join(capsys.readouterr().out.split())
