"""The text of checkpoints that carry other towers: taken out, compared with the whole, trained, and put back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from compressed_layout import entries, packed
from pairs import assert_close
from real_repos.decoders import qwen_words
from real_repos.record import write
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import blockformer
from blockformer.cli import main
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families.composites import COMPOSITES, text_of
from blockformer.conversion.families.head import RELEASED
from blockformer.conversion.for_search import convert_for_search
from blockformer.doctor import diagnose
from blockformer.summary import summarize

from .oracles import (
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    fingerprint,
    randomize_biases_and_norms,
    stored,
)
from .test_gptq import ENTRIES as GPTQ
from .test_gptq import packed as packed_by_gptq

TEXT = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WITHOUT_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
QWEN_PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
QWEN_PATCHES |= {"out_hidden_size": 32, "num_position_embeddings": 16}
PATCHES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES |= {"image_size": 16, "patch_size": 4}
QWEN_TOKENS = {"image_token_id": 101, "video_token_id": 102, "vision_start_token_id": 103, "vision_end_token_id": 104}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
STATES = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
    "initializer_range": 0.1,
}
WHOLE = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "vision_config": {"model_type": "siglip_vision_model", **PATCHES},
        "mm_tokens_per_image": 4,
        "image_token_index": 101,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": {**QWEN_PATCHES, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**WITHOUT_HEAD_DIM, "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}},
        "vision_config": {**QWEN_PATCHES, "fullatt_block_indexes": [0], "window_size": 8},
        **QWEN_TOKENS,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **PATCHES, "head_dim": 8},
        "image_token_index": 101,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": {**TEXT, **STATES}, "vision_config": QWEN_PATCHES, **QWEN_TOKENS},
}
MIXED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WHOLE["qwen3_vl_moe"] = {**WHOLE["qwen3_vl"], "text_config": {**WHOLE["qwen3_vl"]["text_config"], **MIXED}}
MIXED = {**MIXED, "shared_expert_intermediate_size": 40}
WHOLE["qwen3_5_moe"] = {**WHOLE["qwen3_5"], "text_config": {**WHOLE["qwen3_5"]["text_config"], **MIXED}}
GROWING = {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.4}
GROWING |= {"original_max_position_embeddings": 6, "max_position_embeddings": 128}
WHOLE["mistral3 of ministral3"] = {
    **WHOLE["mistral3"],
    "text_config": {**TEXT, "model_type": "ministral3", "rope_parameters": GROWING},
}
WHOLE["mistral3 of mistral4"] = {
    **WHOLE["mistral3"],
    "text_config": {
        **WITHOUT_HEAD_DIM,
        "model_type": "mistral4",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "initializer_range": 0.2,
        "rope_parameters": {**GROWING},  # the official class adds to it
    },
}
WHOLE["qwen2_vl"] = {
    **WHOLE["qwen2_5_vl"],
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
}
WHOLE["gemma4"] = {
    "text_config": {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 131,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "vision_config": {**PATCHES, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16},
    "audio_config": None,  # and tokens of pictures, for which the whole model reads padding, are none of the text's
}
WHOLE["gemma4 with experts"] = {
    **WHOLE["gemma4"],
    "text_config": {
        **WHOLE["gemma4"]["text_config"],
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
WHOLE["gemma4_unified"] = {
    "text_config": {
        **{name: value for name, value in WHOLE["gemma4"]["text_config"].items() if "per_layer" not in name},
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8}
    | {"output_proj_dims": 32},
    "audio_config": None,
}
SLIDING_TURNS = {"sliding_attention": {**MROPE, "rope_theta": 1e4}, "full_attention": None}
WHOLE["cohere_compass"] = {
    **WHOLE["qwen3_vl"],
    "text_config": {
        **TEXT,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
        "rope_parameters": SLIDING_TURNS,
        "logit_scale": 0.5,
    },
}
WHOLE["aria"] = {
    "text_config": {
        **WITHOUT_HEAD_DIM,
        "intermediate_size": 24,
        "moe_num_experts": 6,
        "moe_topk": 2,
    },
    "vision_config": {"model_type": "idefics3_vision", **PATCHES},
    "projector_patch_to_query_dict": {16: 4},
    "image_token_index": 101,
}
PLAIN = {name: value for name, value in TEXT.items() if name not in ("head_dim", "pad_token_id")}
for name, kind in {"llava": "llama", "llava_next": "mistral", "llava_onevision": "qwen2"}.items():
    WHOLE[name] = {
        "text_config": {**PLAIN, "model_type": kind, "sliding_window": None},
        "vision_config": {"model_type": "siglip_vision_model" if kind == "qwen2" else "clip_vision_model", **PATCHES},
        "image_token_index": 101,
    }
WHOLE["llava"]["text_config"].pop("sliding_window")
UNREAD = ("k_proj", "v_proj")
TOWERS = ("vis", "projector", "image_newline")
KINDS = list(WHOLE)


def record_of(kind):
    return COMPOSITES[kind.partition(" ")[0]]


def whole_model(kind, **changes):
    """A small official model of a kind, its weights large and random."""
    record = record_of(kind)
    if record.model_class_name not in RELEASED:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{record.name}Config")(**WHOLE[kind] | changes)
    model = getattr(transformers, record.model_class_name)(config).eval()
    randomize_biases_and_norms(model, spread=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


def whole_folder(folder, kind, tokenizer=None, **changes):
    """The same, saved in two files, with the files that a processor reads."""
    model = whole_model(kind, **changes)
    model.save_pretrained(folder, max_shard_size="60KB")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "AnyImageProcessor"}\n')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return model


def contents(folder):
    """Name -> bytes of every file, except for the mark of this package."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".blockformer.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def trained(repo, folder):
    """A model of ours with other weights, saved as a Trainer would; and the model."""
    model = blockformer.from_official(repo)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    shutil.copytree(repo, folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def assert_same_text(ours, whole):
    """Logits with padding on the left, positions given and counted, and greedy text are those of the whole model."""
    torch.manual_seed(2)
    ids = torch.randint(3, 100, (2, 21))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs = whole(input_ids=ids, attention_mask=mask, position_ids=places).logits
    assert_close(ours(input_ids=ids, attention_mask=mask, position_ids=places).logits[mask == 1], theirs[mask == 1])
    assert_close(ours(input_ids=ids).logits, whole(input_ids=ids).logits)
    for model in (ours, whole):
        model.generation_config = GenerationConfig(pad_token_id=0)
    settings = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(**settings), whole.generate(**settings))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_taken_out_and_put_back(tmp_path, kind):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_folder(src, kind)
    before = fingerprint(src)
    report = convert(src, dst)
    assert_verified(report)
    assert report.family in record_of(kind).families.values()
    note = next(note for note in report.notes if "stay there" in note)
    left = [name for name in stored(src) if any(each in name for each in TOWERS)]
    assert left
    assert note.startswith("this is the text model of a")
    assert f" {kind.partition(' ')[0]} checkpoint; {len(left)} tensors" in note
    ours = blockformer.from_official(dst)
    assert_same_text(ours, whole)
    with pytest.warns(UserWarning, match="stay there"):
        assert_same_text(blockformer.from_official(src), whole)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)
    assert fingerprint(src) == before


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_trained_text_differs(tmp_path, kind):
    src, dst, tuned, out = (tmp_path / name for name in ("src", "dst", "tuned", "out"))
    whole_folder(src, kind)
    convert(src, dst, verify=False)
    ours = trained(dst, tuned)
    assert_verified(convert(tuned, out, to_official=True, into=src))
    old, new = contents(src), contents(out)
    assert old.keys() == new.keys()
    assert all(old[name] == new[name] for name in old if not name.endswith(".safetensors"))
    old, new = stored(src), stored(out)
    assert old.keys() == new.keys()
    changed = {name for name in old if old[name] != new[name]}
    fixed = (*TOWERS, "layer_scalar")  # the last are stored factors, which do not learn
    assert changed == {name for name in old if not any(each in name for each in fixed)}
    assert_same_text(ours, type(whole_model(kind)).from_pretrained(out))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", *KINDS[-8:]])
def test_the_text_goes_out_by_itself(tmp_path, kind):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_folder(src, kind)
    convert(src, dst, verify=False)
    assert_verified(convert(dst, out, to_official=True))
    text = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(text).__name__ == entries_of(out)["architectures"][0]
    assert_same_text(text, whole)
    assert not (out / "preprocessor_config.json").exists()


SPELLINGS = {
    "gemma3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
}
SPELLINGS["gemma3"] |= {f"model.{each}.": f"{each}." for each in ("vision_tower", "multi_modal_projector")}


@pytest.mark.parametrize("back", [False, True], ids=["as published", "as the class has them"])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_both_spellings_are_read(tmp_path, kind, back):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_model(kind)
    src.mkdir()
    whole.config.architectures = [type(whole).__name__]
    whole.config.save_pretrained(src)
    tensors = {}
    for name, tensor in whole.state_dict().items():
        if name != "lm_head.weight" or not whole.config.tie_word_embeddings:
            old, new = next((each for each in SPELLINGS[kind].items() if name.startswith(each[0])), ("", ""))
            tensors[name if back else new + name.removeprefix(old)] = tensor.clone().contiguous()
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    assert_verified(convert(src, dst))
    assert_same_text(blockformer.from_official(dst), whole)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)


@pytest.mark.parametrize("as_class", [False, True], ids=["as published", "as the class has them"])
def test_experts_are_read_with_their_axes_in_either_order(tmp_path, as_class):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_model("qwen3_vl_moe")
    whole.save_pretrained(src)
    if not as_class:
        edit_tensors(
            src,
            lambda tensors: {
                name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
            },
        )
    name = next(name for name in stored(src) if name.endswith("experts.gate_up_proj"))
    assert stored(src)[name][1] == ([6, 48, 32] if as_class else [6, 32, 48])
    assert_same_text(type(whole).from_pretrained(src), whole)
    assert_verified(convert(src, dst))
    ours = blockformer.from_official(dst)
    assert_same_text(ours, whole)
    assert ours.model.layers[0].mlp.experts.gate_up_proj.shape == (6, 48, 32)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)


def test_a_flat_config_is_read(tmp_path):
    whole_folder(tmp_path / "src", "qwen2_5_vl")
    entries = entries_of(tmp_path / "src")
    text = entries.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    named = {name: text[name] for name in (*TEXT, "rope_theta", "rope_scaling") if name in text}
    (tmp_path / "src" / "config.json").write_text(json.dumps({**entries, **named}))
    assert_verified(convert(tmp_path / "src", tmp_path / "dst"))


def test_a_tied_head_that_is_stored_twice_follows_the_text(tmp_path):
    src, dst, tuned, out = (tmp_path / name for name in ("src", "dst", "tuned", "out"))
    whole_folder(src, "gemma3")
    shutil.rmtree(src)
    model = whole_model("gemma3")
    model.save_pretrained(src)
    embeddings = next(name for name in stored(src) if name.endswith("embed_tokens.weight"))
    table = load_file(src / "model.safetensors")[embeddings]
    edit_tensors(src, **{"language_model.lm_head.weight": table})
    convert(src, dst, verify=False)
    ours = trained(dst, tuned)
    convert(tuned, out, to_official=True, into=src)
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["language_model.lm_head.weight"], ours.get_input_embeddings().weight)
    assert torch.equal(found[embeddings], ours.get_input_embeddings().weight)


def test_weights_take_the_dtype_of_the_composite(tmp_path):
    src, dst, tuned, out = (tmp_path / name for name in ("src", "dst", "tuned", "out"))
    whole_model("qwen3_vl").to(torch.bfloat16).save_pretrained(src)
    convert(src, dst)
    model = blockformer.from_official(dst, dtype="float32")
    shutil.copytree(dst, tuned)
    (tuned / "model.safetensors").unlink()
    model.save_pretrained(tuned)
    report = convert(tuned, out, to_official=True, into=src)
    assert_verified(report)
    assert any("float32 are cast" in note for note in report.notes)
    assert contents(out) == contents(src)


def test_layers_that_predict_further_go_along(tmp_path):
    src, dst, out, plain = (tmp_path / name for name in ("src", "dst", "out", "plain"))
    whole_model("qwen3_5").save_pretrained(src)
    edit_tensors(src, **{"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.randn(32)})
    assert_verified(convert(src, dst))
    convert(dst, out, to_official=True, into=src)
    assert contents(out) == contents(src)
    convert(dst, plain, to_official=True)
    with safe_open(plain / "model.safetensors", "pt") as written, safe_open(src / "model.safetensors", "pt") as first:
        assert torch.equal(written.get_tensor("mtp.fc.weight"), first.get_tensor("mtp.fc.weight"))


TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
AS_PROCESSOR = {"chat_template.json": {"chat_template": TEMPLATE}}
TEMPLATES = {"gemma3": AS_PROCESSOR, "mistral3": AS_PROCESSOR, "gemma4": {"chat_template.jinja": TEMPLATE}}
CHAT = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]


def with_tokenizer(src, kind, tiny_tokenizer):
    """Save a whole model with a tokenizer, Qwen's as published, and a chat template; gives the tokenizer."""
    words = qwen_words("<think>", "</think>")().files if kind.startswith("qwen") else {}
    (src / "tokenizer").mkdir(parents=True)
    tiny_tokenizer.save_pretrained(src / "tokenizer")
    (src / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    for name, content in (words | TEMPLATES.get(kind, {})).items():
        write(src / "tokenizer", name, content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(src / "tokenizer")
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
    text = WHOLE[kind]["text_config"]
    whole_folder(src, kind, text_config=text | {name: size for name, size in sizes.items() if name in text})
    for path in (src / "tokenizer").iterdir():
        path.rename(src / path.name)
    (src / "tokenizer").rmdir()
    return tokenizer


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_tokenizer_and_chat_template_come_along(tmp_path, tiny_tokenizer, kind):
    """Into ours, back into the whole, and into the text by itself: also a template that only the processor has."""
    src, dst, out, text = (tmp_path / name for name in ("src", "dst", "out", "text"))
    first = with_tokenizer(src, kind, tiny_tokenizer)
    template = TEMPLATE if kind in TEMPLATES else first.chat_template
    report = convert(src, dst)
    assert_verified(report)
    assert "preprocessor_config.json" in {name for names in report.left_out.values() for name in names}
    convert(dst, out, to_official=True, into=src)
    assert contents(out) == contents(src)
    convert(dst, text, to_official=True)
    for folder in (dst, text):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == template
        assert "Hello there" in tokenizer.apply_chat_template(CHAT, tokenize=False)
        assert tokenizer("Hello there").input_ids == first("Hello there").input_ids


def test_inspect_and_presets_of_the_config(tmp_path):
    whole_folder(tmp_path / "src", "qwen3_vl")
    summary = summarize(tmp_path / "src")
    assert summary.config.num_hidden_layers == 3
    assert any("text model of a qwen3_vl checkpoint" in note for note in summary.notes)


def test_doctor_finds_a_whole_checkpoint_healthy(tmp_path):
    whole_folder(tmp_path / "src", "qwen2_5_vl")
    found = diagnose(tmp_path / "src")
    assert {each.kind for each in found.findings if each.severity != "note"} <= {"fresh"}  # its numbers are random
    assert found.family == "qwen2"
    assert found.what.startswith("Qwen2_5_VLForConditionalGeneration, ")
    edit_config(tmp_path / "src", tie_word_embeddings="no")
    assert any("Qwen2_5_VLConfig refuses it" in each.sentence for each in diagnose(tmp_path / "src").findings)


def test_the_command_line_goes_both_ways(tmp_path, capsys):
    src, dst, out = (str(tmp_path / name) for name in ("src", "dst", "out"))
    whole_folder(tmp_path / "src", "qwen3_vl")
    for arguments in (["convert", src, dst], ["convert", dst, out, "--to", "official", "--into", src]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code in (0, None)
    told = capsys.readouterr().out
    assert "`--to official --into` puts the text back" in told
    assert contents(out) == contents(src)
    for arguments, message in (
        (["convert", dst, out + "2", "--into", src], "into (--into) is for the official layout; add --to official"),
        (["convert", dst, src, "--to", "official", "--into", src], "is the source"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mistral3 of ministral3", "qwen3_vl"])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["one factor", "blocks"])
def test_a_text_of_8_bits_becomes_plain(tmp_path, kind, in_blocks):
    """As Ministral 3 and Devstral Small 2 (one factor a matrix, inputs of 8 bits), and Qwen3-VL (blocks) publish it."""
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole_folder(src, kind)
    plain = {name: each.bfloat16() for path in src.glob("*.safetensors") for name, each in load_file(path).items()}
    changes, generator = {}, torch.Generator().manual_seed(0)
    for name in [name for name in plain if "language_model" in name and name.endswith("_proj.weight")]:
        weight = plain[name].float()
        blocks = [-(-size // 128) for size in weight.shape] if in_blocks else []
        factors = (torch.rand(blocks, generator=generator) * 0.002 + 0.001).bfloat16()
        low = (weight / factors.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain[name] = (low.float() * factors.float()).bfloat16()
        changes |= {name: low, f"{name}_scale_inv": factors}
        if not in_blocks:
            changes[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.02, dtype=torch.bfloat16)
    assert changes
    rewrite(src, {**plain, **changes})
    told = {"quant_method": "fp8", "activation_scheme": "dynamic" if in_blocks else "static", "dequantize": False}
    told |= {"weight_block_size": [128, 128] if in_blocks else None, "modules_to_not_convert": ["lm_head"]}
    edit_config(src, quantization_config=told, dtype="bfloat16")
    report = convert(src, dst)
    assert_verified(report)
    assert any("FP8 weights have become bfloat16" in note for note in report.notes)
    assert not any("--into" in note for note in report.notes)
    rewrite(out, plain, like=src)
    whole = type(whole_model(kind)).from_pretrained(out, dtype=torch.float32)
    assert_same_text(blockformer.from_official(dst, dtype=torch.float32), whole)
    with pytest.warns(UserWarning, match="stay there|have become bfloat16"):
        assert_same_text(blockformer.from_official(src, dtype=torch.float32), whole)
    assert any("stored in FP8" in note for note in summarize(src).notes)
    assert diagnose(src, quick=True).status == 0
    with pytest.raises(ConversionError, match="its text has weights in few bits"):
        convert(dst, tmp_path / "back", to_official=True, into=src)


OF_4_BITS = {
    "llm-compressor": ("qwen3_vl", lambda weight: packed(weight, 1), entries("channel")),
    "llm-compressor, the tower plain": (
        "qwen3_vl",
        lambda weight: packed(weight, 1),
        entries("channel", ignore=["lm_head", "re:.*vision.*"]),
    ),
    "GPTQ": ("qwen2_5_vl", lambda weight: packed_by_gptq(weight, 4, True, True, True), GPTQ),
}


@pytest.mark.parametrize("case", OF_4_BITS)
def test_a_text_of_4_bits_stays_or_becomes_plain(tmp_path, case):
    """It stays where the settings show that all of its linear layers have 4 bits."""
    kind, made, told = OF_4_BITS[case]
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole_folder(src, kind)
    plain = {name: each.bfloat16() for path in src.glob("*.safetensors") for name, each in load_file(path).items()}
    tensors = {}
    for name, weight in plain.items():
        if not ("language_model" in name or "model.layers" in name) or not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        parts, plain[name] = made(weight)
        tensors |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
    assert len(tensors) > len(plain)
    rewrite(src, tensors)
    edit_config(src, quantization_config=told, dtype="bfloat16")
    report = convert(src, dst)
    assert_verified(report)
    becomes_plain = "plain" in case
    assert any(("have become plain" if becomes_plain else "stay, in AWQ") in note for note in report.notes)
    assert diagnose(src, quick=True).status == 0
    with pytest.raises(ConversionError, match="its text has weights in few bits"):
        convert(dst, tmp_path / "back", to_official=True, into=src)
    if becomes_plain:
        rewrite(out, plain, like=src)
        whole = type(whole_model(kind)).from_pretrained(out, dtype=torch.float32)
        assert_same_text(blockformer.from_official(dst, dtype=torch.float32), whole)
        assert any("stored in 4 bits" in note for note in summarize(src).notes)


def rewrite(folder, tensors, like=None):
    """Put these tensors in place of a folder's, in one file; of a new folder the rest is as in another one."""
    if like is not None:
        shutil.copytree(like, folder)
        edit_config(folder, quantization_config=...)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


REFUSED = {
    "other architectures": ({"architectures": ["Gemma3Model"]}, "only Gemma3ForConditionalGeneration is read"),
    "another text": (
        {"text_config": {**WHOLE["gemma3"]["text_config"], "model_type": "llama"}},
        "text_config is of 'llama'",
    ),
    "few bits": (
        {"quantization_config": {"quant_method": "awq"}},
        "of low-bit weights only FP8, GPTQ and compressed-tensors are read",
    ),
    "bad settings": ({"vision_config": 3}, "Gemma3Config refuses it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, case):
    changes, message = REFUSED[case]
    whole_folder(tmp_path / "src", "gemma3")
    edit_config(tmp_path / "src", **changes)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_keys_of_layers_that_share_them_are_kept_for_the_way_back(tmp_path):
    src, dst, out, plain = (tmp_path / name for name in ("src", "dst", "out", "plain"))
    whole = whole_model("gemma4")
    whole.save_pretrained(src)
    unread = {f"model.language_model.layers.3.self_attn.{name}.weight": torch.randn(32, 32) for name in UNREAD}
    unread["model.language_model.layers.3.self_attn.k_norm.weight"] = torch.randn(32)
    edit_tensors(src, **unread)
    assert_verified(convert(src, dst))
    assert_same_text(blockformer.from_official(dst), whole)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)
    convert(dst, plain, to_official=True)
    with safe_open(plain / "model.safetensors", "pt") as written:
        for name, tensor in unread.items():
            assert torch.equal(written.get_tensor(name.replace("language_model.", "")), tensor)


STRANGE = {
    "wide networks": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        r"intermediate_sizes=.* is not supported with num_experts=4",
    ),
    "both ways": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    "another vocabulary": ({"vocab_size_per_layer_input": 100}, "is .100. and vocab_size 131; Blockformer"),
    "other layers": ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "different heads"),
    "other networks": ({"per_layer_config": {"1": {"intermediate_size": 64}}}, "per_layer_config is"),
    "no keys": ({"num_kv_shared_layers": 3}, "layers? of 'full_attention' that makes keys|layer types producing"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_ours_lacks_of_gemma_4_is_refused_by_name(tmp_path, case):
    changes, message = STRANGE[case]
    whole_model("gemma4").save_pretrained(tmp_path / "src")
    entries = entries_of(tmp_path / "src")
    edit_config(tmp_path / "src", text_config={**entries["text_config"], **changes})
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_composite_without_a_text_is_refused(tmp_path):
    whole_model("gemma3").save_pretrained(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: {f"x.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(ConversionError, match="no tensor of a text model; their names begin with"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_a_repo_for_search_is_made_of_the_text_in_two_steps(tmp_path, tiny_tokenizer):
    whole_folder(tmp_path / "src", "gemma3", tiny_tokenizer)
    with pytest.raises(ConversionError, match="has towers next to the text; convert it first"):
        convert_for_search(tmp_path / "src", tmp_path / "dst", use="embedder")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A composite checkpoint and the text taken out of it."""
    folder = tmp_path_factory.mktemp("made")
    whole_folder(folder / "src", "gemma3")
    convert(folder / "src", folder / "dst", verify=False)
    return folder


def refused(made, message, dst=None, src=None, out=None, **options):
    out = made / "out" if out is None else out
    with pytest.raises(ConversionError, match=message) as caught:
        convert(dst or made / "dst", out, **{"to_official": True, "into": src or made / "src", **options})
    assert len(str(caught.value).splitlines()) == 1
    assert out == made / "src" or not out.exists()


def test_another_checkpoint_is_refused_for_a_text(made, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(made / "src", other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    refused(made, "not the checkpoint that .* was made from: its config.json differs", src=other)
    torch.manual_seed(5)
    shutil.rmtree(other)
    model = whole_folder(other, "gemma3")
    with torch.no_grad():
        next(each for name, each in model.named_parameters() if "vision" in name).add_(1)
    model.save_pretrained(other, max_shard_size="60KB")
    refused(made, "was made from: its other tensors differ", src=other)
    whole_folder(tmp_path / "qwen", "qwen3_vl")
    refused(made, "a checkpoint of 'qwen3_vl', but the text in .* came from one of 'gemma3'", src=tmp_path / "qwen")
    blockformer.export_model(blockformer.from_official(made / "dst"), tmp_path / "fresh")
    refused(made, "was not made from a checkpoint with other towers", dst=tmp_path / "fresh")
    refused(made, "has no towers next to a text model", src=made / "dst")
    refused(made, "no such folder; into", src=tmp_path / "none")
    refused(made, "src: .*source", out=made / "src")


def test_a_text_of_other_shapes_or_settings_is_refused(made, tmp_path):
    model = blockformer.from_official(made / "dst")
    model.resize_token_embeddings(140)
    shutil.copytree(made / "dst", tmp_path / "larger")
    for path in (tmp_path / "larger").glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(tmp_path / "larger")
    message = r"embed_tokens.weight' is \[140, 32\] here and \[131, 32\] there"
    refused(made, message, dst=tmp_path / "larger")
    shutil.copytree(made / "dst", tmp_path / "other")
    edit_config(tmp_path / "other", sliding_window=5)
    refused(made, "sliding_window changed since the text was taken", dst=tmp_path / "other")


def test_options_that_the_composite_decides_are_refused(made):
    refused(made, "add to_official=True", to_official=False)
    refused(made, "keeps the dtype of", dtype="bfloat16")
    refused(made, "keeps the max_shard_size of", max_shard_size="1GB")
    refused(made, "keeps the family of", family="gemma3_text")


def test_copies_of_the_weights_are_named(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made / "src", src)
    (src / "consolidated.safetensors").write_bytes(b"old")
    (src / ".cache").mkdir()
    (src / ".cache" / "x").write_text("x")
    report = convert(made / "dst", tmp_path / "out", to_official=True, into=src, verify=False)
    assert "copied as they are, with the old text model: 'consolidated.safetensors'" in report.notes
    assert "not copied: '.cache/'" in report.notes
    assert (tmp_path / "out" / "consolidated.safetensors").read_bytes() == b"old"


def test_every_record_is_of_a_family_and_of_the_release(made):
    for kind, record in COMPOSITES.items():
        assert set(record.families.values()) <= set(blockformer.conversion.families.registry.FAMILIES)
        assert kind in WHOLE or kind in ("embedding_gemma2", "t5gemma2")  # which have files of their own
    assert text_of({"model_type": "gemma3_text"}) is None
