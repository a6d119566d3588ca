"""Drafts of files of names: what shapes and names tell, and questions that keep an unread draft from making a model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockformer.cli import main
from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend
from blockformer.doctor.drafting import draft

from ..conversion.oracles import entries_of, official_folder, stored
from .test_own_code import nano_gpt

LAYER = "model.layers.{layer}."
LLAMA = {"tie_word_embeddings": False, "head_dim": 16, "attention_bias": False, "mlp_bias": False}
INNER = {"settings": {"intermediate_size": 96}}
QKV = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
BOTH = [f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up")]
NAMELESS = {
    "model.embed_tokens": "letters",
    "lm_head": "speak",
    "model.norm": "last",
    "model.layers.": "tower.",
    "self_attn.o_proj": "back",
    "mlp.down_proj": "tell",
    "input_layernorm": "calm_a",
    "post_attention_layernorm": "calm_b",
}


def renamed(all_, **names):
    """Tensors under other names, by parts of their names."""
    made = {}
    for name, each in all_.items():
        for old, new in (NAMELESS | names).items():
            name = name.replace(old, new)
        made[name] = each
    return made


def joined(all_):
    """Queries, keys and values as one matrix, and gate and up, under names that say nothing."""
    made = dict(all_)
    for layer in (0, 1):
        for names, new in ((QKV, "look"), (BOTH, "think")):
            parts = [made.pop(name.replace("{layer}", str(layer))) for name in names]
            made[f"model.layers.{layer}.{new}.weight"] = torch.cat(parts)
    return renamed(made)


def drafted(folder, tensors, family="llama", **options):
    """The draft of a file with these tensors, and what is said of it."""
    save_file(tensors, folder / "own.safetensors")
    said = draft(folder / "own.safetensors", folder / "names.json", options=Options(family=family, **options))
    return json.loads((folder / "names.json").read_text()), " ".join(said)


def answered(folder, content, config, **tensors):
    """The draft with answers: of the config, and the rest of an entry by the name at its beginning."""
    for entry in content["tensors"]:
        entry[1:] = tensors.get(str(entry[0]).removesuffix(".weight").rpartition(".")[2], entry[1:])
    content["config"] |= {name: config.get(name) for name, each in content["config"].items() if str(each)[0] == "?"}
    content.pop("drop", None)
    (folder / "names.json").write_text(json.dumps(content))
    return Options(names=str(folder / "names.json"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "official"
    official_folder(folder, "llama", **LLAMA)
    return folder


def test_shapes_tell_the_sizes_and_what_is_joined(tmp_path, llama):
    content, said = drafted(tmp_path, joined(load_file(llama / "model.safetensors")), **INNER)
    wanted, config = entries_of(llama), content["config"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings"):
        assert config[name] == wanted[name]
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta"):
        assert config[name].startswith("? ")
    entries = {each[0]: each[1:] for each in content["tensors"]}
    assert entries["tower.{layer}.look.weight"][0] == QKV
    assert entries["tower.{layer}.look.weight"][1].startswith("? split if all queries, keys and values lie one after")
    assert entries["tower.{layer}.look.weight"][2].startswith(
        '? {"each": ["pairs-to-halves", "pairs-to-halves", null]}'
    )
    assert entries["tower.{layer}.think.weight"][0] == BOTH
    assert entries["tower.{layer}.back.weight"] == [f"{LAYER}self_attn.o_proj.weight"]
    assert entries["tower.{layer}.tell.weight"] == [f"{LAYER}mlp.down_proj.weight"]
    assert entries["last.weight"] == ["model.norm.weight"]
    norms = [f"? {LAYER}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    assert entries["tower.{layer}.calm_a.weight"] == [" or ".join([norms[0], norms[1][2:]])]
    assert entries["speak.weight"] == ["? model.embed_tokens.weight or lm_head.weight"]
    assert "not known: 'letters.weight', 'speak.weight', 'tower.{layer}.calm_a.weight'" in said
    assert "known by their names: none" in said


def test_a_name_says_the_order_of_what_is_joined(tmp_path, llama):
    tensors = {
        name.replace("look", "kqv"): each for name, each in joined(load_file(llama / "model.safetensors")).items()
    }
    content, _ = drafted(tmp_path, tensors, **INNER)
    (entry,) = (each for each in content["tensors"] if "kqv" in each[0])
    assert entry[1] == [QKV[1], QKV[0], QKV[2]]


def test_a_draft_makes_no_model_until_it_is_answered(tmp_path, llama):
    tensors = joined(load_file(llama / "model.safetensors"))
    content, _ = drafted(tmp_path, tensors, **INNER)
    options = Options(names=str(tmp_path / "names.json"))
    with pytest.raises(ConversionError) as caught:
        mend(tmp_path / "own.safetensors", tmp_path / "out", options=options)
    said = str(caught.value)
    assert "questions of the draft are open; put the answer in place of each text that begins with ?:" in said
    for line in ("'num_attention_heads': '? ", "'speak.weight': '? model", "'tower.{layer}.think.weight': '? split if"):
        assert line in said
    with pytest.raises(ConversionError, match="questions of the draft are open"):
        diagnose(tmp_path / "own.safetensors", options=options)
    answers = {
        "letters": ["model.embed_tokens.weight"],
        "speak": ["lm_head.weight"],
        "look": [QKV, "split"],
        "think": [BOTH, "split"],
        "calm_a": [f"{LAYER}input_layernorm.weight"],
        "calm_b": [f"{LAYER}post_attention_layernorm.weight"],
    }
    config = {**entries_of(llama), "rope_theta": 10000.0}
    for left in answers:  # each by itself keeps it from making a model
        some = {name: each for name, each in answers.items() if name != left}
        with pytest.raises(ConversionError, match=f"(?s)questions? of the draft.*{left}.weight"):
            diagnose(
                tmp_path / "own.safetensors",
                options=answered(tmp_path, json.loads(json.dumps(content)), config, **some),
            )
    mend(tmp_path / "own.safetensors", tmp_path / "out", options=answered(tmp_path, content, config, **answers))
    assert stored(tmp_path / "out") == stored(llama)
    assert not (tmp_path / "out/names.json").exists()


def test_names_tell_where_shapes_do_not(tmp_path, llama):
    names = {"letters": "wte", "speak": "head", "self_attn": "attn", "calm_a": "ln_1", "calm_b": "ln_2"}
    tensors = renamed(load_file(llama / "model.safetensors"), **names)
    content, said = drafted(tmp_path, tensors)
    entries = {each[0]: each[1:] for each in content["tensors"]}
    assert entries["wte.weight"] == ["model.embed_tokens.weight"]
    assert entries["tower.{layer}.ln_2.weight"] == [f"{LAYER}post_attention_layernorm.weight"]
    assert entries["tower.{layer}.mlp.gate_proj.weight"] == BOTH[:1]
    asked = "? pairs-to-halves if the rotated pairs lie side by side in each head, or remove this"
    assert entries["tower.{layer}.attn.q_proj.weight"] == [QKV[0], asked]
    assert entries["tower.{layer}.attn.v_proj.weight"] == [QKV[2]]
    assert "not known: none" in said
    assert "'tower.{layer}.ln_1.weight'" in said.partition("known by their names: ")[2]


@pytest.mark.parametrize("which", ["all", "one"])
def test_transposed_matrices(tmp_path, llama, which):
    def turned(name):
        return "tower" in name and (which == "all" or "tell" in name)

    tensors = renamed(load_file(llama / "model.safetensors"))
    tensors = {name: each.T.contiguous() if turned(name) and each.ndim == 2 else each for name, each in tensors.items()}
    tensors["tower.0.calm_a.weight"] = tensors["tower.0.calm_a.weight"][None]
    tensors["tower.1.calm_a.weight"] = tensors["tower.1.calm_a.weight"][None]
    tensors |= {f"tower.{layer}.mask": torch.ones(1, 1, 8, 8) for layer in (0, 1)}
    content, _ = drafted(tmp_path, tensors)
    entries = {each[0]: each[1:] for each in content["tensors"]}
    assert entries["tower.{layer}.calm_a.weight"][1] == "squeeze"
    assert content["drop"] == ["? tower.{layer}.mask, if your code computes it again"]
    if which == "all":
        assert entries["tower.{layer}.tell.weight"] == [f"{LAYER}mlp.down_proj.weight", "transpose"]
        assert entries["tower.{layer}.mlp.gate_proj.weight"] == [*BOTH[:1], "transpose"]
    else:  # three matrices have the same shape, and their names tell two of them
        assert entries["tower.{layer}.tell.weight"] == [f"{LAYER}mlp.down_proj.weight", "transpose"]
        assert entries["tower.{layer}.mlp.gate_proj.weight"] == BOTH[:1]
        assert entries["tower.{layer}.self_attn.v_proj.weight"][1:] == []


@pytest.mark.parametrize(
    ("family", "settings", "asked"),
    [("qwen3", {"head_dim": 32}, 0), ("qwen2", {"num_key_value_heads": 4}, 2), ("gpt2", {}, 1), ("olmo2", {}, 2)],
)
def test_other_families_by_their_own_names(tmp_path, family, settings, asked):
    """Names of the family itself: no tensor is asked for, only the pairs and the config."""
    official_folder(tmp_path / "official", family, tie_word_embeddings=False, **settings)
    tensors = load_file(tmp_path / "official/model.safetensors")
    tensors = {name.replace("transformer.", "net."): each for name, each in tensors.items()}
    content, said = drafted(tmp_path, tensors, family)
    wanted = entries_of(tmp_path / "official")
    heads = {"num_attention_heads", "num_key_value_heads", "n_head"} & {*content["config"]}
    assert len([name for name in heads if str(content["config"][name]).startswith("? ")]) == asked
    for name, each in content["config"].items():
        assert str(each).startswith("? ") or each == wanted.get(name, each)
    assert "not known: none" in said
    joined = [entry for entry in content["tensors"] if "c_attn" in entry[0]]
    assert all("remove this if the queries, keys and values in it lie as in the family" in each[2] for each in joined)
    for entry in content["tensors"]:
        entry[2:] = []
    options = answered(tmp_path, content, {**wanted, "rope_theta": 10000.0})
    mend(tmp_path / "own.safetensors", tmp_path / "out", options=options)
    assert stored(tmp_path / "out") == stored(tmp_path / "official")


def test_the_family_is_named_by_the_user(tmp_path, llama):
    save_file(joined(load_file(llama / "model.safetensors")), tmp_path / "own.safetensors")
    with pytest.raises(ConversionError, match="name it with --family; llama or "):
        draft(tmp_path / "own.safetensors", tmp_path / "names.json")
    given = Options(**INNER)
    draft(tmp_path / "own.safetensors", tmp_path / "names.json", llama, options=given)
    assert json.loads((tmp_path / "names.json").read_text())["config"]["model_type"] == "llama"
    with pytest.raises(ConversionError, match=r"names.json is already there: name another file"):
        draft(tmp_path / "own.safetensors", tmp_path / "names.json", llama, options=given)


def test_sizes_that_shapes_leave_open_are_asked_for(tmp_path, llama):
    """Queries, keys and values of 64, 32 and 32 rows, and twice 96: or 96, 48 and 48 rows, and twice 64."""
    save_file(joined(load_file(llama / "model.safetensors")), tmp_path / "own.safetensors")
    with pytest.raises(ConversionError, match="intermediate_size 64 or 96; say which: --set intermediate_size=64"):
        draft(tmp_path / "own.safetensors", tmp_path / "names.json", llama)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda all_: {"a": torch.ones(3)}, "no layers: none of the names have numbers from 0"),
        (lambda all_: {**all_, "tower.1.tell.weight": torch.ones(3)}, "'tower.{layer}.tell.weight' has another shape"),
        (lambda all_: {**all_, "tower.0.x": torch.ones(3), "tower.1.x": torch.ones(3)}, "do not fit a llama"),
        (lambda all_: nano_gpt(True), "a checkpoint of nanoGPT, which needs no file of names"),
    ],
)
def test_what_is_not_drafted(tmp_path, llama, change, said):
    tensors = change(joined(load_file(llama / "model.safetensors")))
    if "nanoGPT" in said:
        torch.save({"model": tensors, "model_args": {}}, tmp_path / "own.pt")
    else:
        save_file(tensors, tmp_path / "own.safetensors")
    source = next(tmp_path.glob("own.*"))
    with pytest.raises(ConversionError, match=said.replace("{", r"\{")):
        draft(source, tmp_path / "names.json", options=Options(family="llama"))
    assert not (tmp_path / "names.json").exists()


def test_the_command(tmp_path, llama, capsys):
    save_file(joined(load_file(llama / "model.safetensors")), tmp_path / "own.safetensors")
    names = str(tmp_path / "names.json")
    asked = ["doctor", str(tmp_path / "own.safetensors"), "--draft", names, "--family", "llama"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--mend", str(tmp_path / "out")])
    assert ended.value.code
    assert "--draft writes a file of names: leave out --map and --mend" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--set", "num_attention_heads=4", "--set", "intermediate_size=96"])
    assert "a draft for llama, with questions in" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "names.json").read_text())["config"]["num_attention_heads"] == 4
