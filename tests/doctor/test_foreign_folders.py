"""Checkpoints that other frameworks and quantizers write: what doctor says of each, every door says, and opens none."""

import json
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

import blockformer
from blockformer.cli.entry import main
from blockformer.conversion import convert, from_official
from blockformer.doctor import diagnose, mend

from ..conversion.oracles import edit_config, edit_tensors, stored
from .doors import refusal, verified
from .test_broken_folders import INDEX, LORA, POINTER, WEIGHTS, in_two, instead, pickled, sentences, taken


def changed(change):
    """Change all tensors by name."""

    def make(folder):
        edit_tensors(folder, lambda all_: dict(pair for name, each in all_.items() for pair in change(name, each)))

    return make


def quantized(**parts):
    """The projections as a quantizer keeps them: the ending of a name -> its tensor, of the plain weight."""

    def change(name, tensor):
        if "_proj" not in name:
            return [(name, tensor)]
        stem = name.removesuffix("weight")
        return [(stem + ending.replace("__", "."), make(tensor)) for ending, make in parts.items()]

    return changed(change)


def of_kind(dtype, *shape):
    return lambda tensor: torch.ones(shape or tensor.shape, dtype=getattr(torch, dtype))


def flax(name, tensor):
    if "norm" in name:
        return [(name.replace(".weight", ".scale"), tensor)]
    kind = "embedding" if "embed" in name else "kernel"
    return [(name.replace("weight", kind), tensor if kind == "embedding" else tensor.T.contiguous())]


def tensorflow(name, tensor):
    return [(name.replace(".", "/").replace("weight", "kernel:0"), tensor)]


def written(name, content=b""):
    """A file in place of the weights."""

    def make(folder):
        taken(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return make


def of_numpy(name):
    def make(folder):
        arrays = {name: each.numpy() for name, each in taken(folder).items()}
        (folder / name).write_bytes(pickle.dumps(arrays, protocol=2))  # of another, torch warns

    return make


def adapter_of_mlx(folder):
    taken(folder)
    (folder / "config.json").unlink()
    settings = {"fine_tune_type": "lora", "model": "me/base", "lora_parameters": {"rank": 8}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(64, 8)}, folder / "adapters.safetensors")


def zeros(folder):
    (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size))


def of_pipeline(folder):
    weights = taken(folder)
    (folder / "global_step5").mkdir()
    torch.save({"module": weights}, folder / "global_step5" / "layer_01-model_00-model_states.pt")


def of_another_save(folder):
    in_two(folder, lambda places: dict.fromkeys(places, "model-00001-of-00005.safetensors"))


def pointer_to_an_index(folder):
    in_two(folder, dict)
    (folder / INDEX).write_text(POINTER)


def unfinished(folder):
    (folder / f"{WEIGHTS}.aria2").touch()


def no_config(folder):
    (folder / "hf").mkdir()
    shutil.move(folder / "config.json", folder / "hf")


SCALES = "weights are int8 with scales .*, and config.json has no quantization_config"
EXPORTED = {
    "model.engine": "TensorRT",
    "model_state.pdparams": "Paddle",
    "model.pte": "ExecuTorch",
    "model.mlmodel": "Core ML",
    "model.tflite": "TensorFlow Lite",
    "openvino_model.bin": "OpenVINO",
}
KINDS = {
    "names of Flax": (changed(flax), "the names of Flax .*transposed.*from_flax=True"),
    "names of TensorFlow": (changed(tensorflow), "the names of TensorFlow .*from_tf=True"),
    "whole numbers and scales": (
        quantized(weight=of_kind("int8"), weight_scale=of_kind("float32", 4, 1)),
        f"14 {SCALES}",
    ),
    "FP8 with a scale": (
        quantized(weight=of_kind("float8_e4m3fn"), weight_scale=of_kind("float32", 1)),
        "14 weights are float8_e4m3fn with scales",
    ),
    "bitsandbytes, 8 bits": (
        quantized(weight=of_kind("int8"), SCB=of_kind("float32", 4)),
        "quantized by bitsandbytes in 8 bits",
    ),
    "bitsandbytes without its state": (
        quantized(weight=of_kind("uint8", 96, 1)),
        "as bitsandbytes does in 4 bits, and what it kept with them, such as scales, is lost",
    ),
    "whole numbers only": (
        quantized(weight=of_kind("int8")),
        {"": "a library has quantized them, and what it kept with them, such as scales, is lost", "shape": "integers"},
    ),
    "NVFP4": (
        quantized(weight=of_kind("uint8", 64, 32), weight_scale_2=of_kind("float32", 1)),
        "quantized by ModelOpt in NVFP4",
    ),
    "HQQ": (quantized(W_q=of_kind("uint8", 9), scale=of_kind("float32", 9)), "quantized by HQQ"),
    "EXL2": (
        quantized(q_weight=of_kind("int32", 9, 9), q_invperm=of_kind("int32", 9), q_scale=of_kind("int32", 9)),
        r"quantized by ExLlamaV2 \(EXL2\)",
    ),
    "EXL3": (quantized(trellis=of_kind("int16", 4, 4), suh=of_kind("float16", 9)), r"quantized by ExLlamaV3 \(EXL3\)"),
    "Quanto": (quantized(weight___data=of_kind("int8"), weight___scale=of_kind("float32", 1)), "quantized by Quanto"),
    "torchao": (quantized(_weight_qdata=of_kind("int8")), "quantized by torchao"),
    "an adapter among the weights": (
        lambda folder: edit_tensors(folder, lambda all_: {**all_, **LORA}),
        "an adapter of 2 matrices is stored with the weights, not merged",
    ),
    "an optimizer's state": (
        lambda folder: edit_tensors(folder, lambda _: {"state.0.exp_avg": torch.ones(3)}),
        "the file holds the state of an optimizer .*, and no model",
    ),
    "a pickle of arrays": (of_numpy("pytorch_model.bin"), "a pickle of NumPy arrays, and not of tensors"),
    "arrays in torch.save": (
        pickled("pytorch_model.bin", lambda all_: {name: each.numpy() for name, each in all_.items()}),
        "a pickle of NumPy arrays, and not of tensors",
    ),
    "objects": (of_numpy("params.pkl"), "'params.pkl' is a pickle of Python objects, .*, and is not opened"),
    "zeros": (zeros, "it begins with zeros: a download or a copy has reserved its place"),
    "CTranslate2": (
        written("pytorch_model.bin", b"\x06\0\0\0\x10\0TransformerSpec\0"),
        "a model for CTranslate2; take the weights that it was converted from",
    ),
    "llama.cpp before GGUF": (written("pytorch_model.bin", b"tjgg" + bytes(40)), "llama.cpp from before GGUF"),
    "HDF5": (written(WEIGHTS, b"\x89HDF\r\n\x1a\n" + bytes(40)), "an HDF5 file of Keras or TensorFlow"),
    "adapter of MLX": (adapter_of_mlx, r"this is an adapter of MLX for 'me/base' .*mlx_lm.fuse --model BASE"),
    "TensorFlow 1": (instead("bert_model.ckpt.index"), "these are weights for TensorFlow .*convert_bert_original_tf"),
    "Keras": (instead("model.weights.h5"), "these are weights for TensorFlow"),
    "a saved model": (instead("saved_model.pb"), "these are weights for TensorFlow"),
    "Megatron, a release": (instead("release/mp_rank_00/model_optim_rng.pt"), "a checkpoint of Megatron-LM"),
    "universal": (instead("global_step9_universal/zero/fp32.pt"), "a universal checkpoint of DeepSpeed"),
    "pipeline": (of_pipeline, "the layers that DeepSpeed saves with pipeline parallelism"),
    "diffusers": (instead("pytorch_lora_weights.safetensors"), "LoRA weights of diffusers, for a model of pictures"),
    "Ollama": (instead("Modelfile"), "a recipe of Ollama, and the weights lie elsewhere"),
    "weights without config": (
        lambda folder: pickled("weights/model.pt", dict)((folder / "weights").mkdir() or folder),
        "the weights lie in the subfolder 'weights'.*copy config.json to them",
    ),
    "another save's index": (of_another_save, "the index names .*-of-00005.*, which are not there, and the folder has"),
    "pointer to an index": (pointer_to_an_index, "index.json: a git-LFS pointer"),
    "aria2": (unfinished, "the download of 'model.safetensors' was not finished"),
    "no config": (no_config, {"": "config.json is missing.*there is one in 'hf'", "verify": "no config.json, so"}),
    **{f"exported, {name}": (instead(name), f"this is a model for {what}") for name, what in EXPORTED.items()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_door_says_what_it_is(tmp_path, models, kind):
    make, said = KINDS[kind]
    patterns = said if isinstance(said, dict) else {"": said}
    for layout in ("official", "ours"):
        make(shutil.copytree(models / layout, tmp_path / layout / "folder"))
    official, ours = tmp_path / "official" / "folder", tmp_path / "ours" / "folder"
    found = diagnose(official)
    assert found.status == 1
    heard = {
        "doctor": sentences(found),
        "from_official": refusal(from_official, official),
        "convert": refusal(convert, official, tmp_path / "new"),
        "back": refusal(lambda: convert(ours, tmp_path / "new", to_official=True)),
        "verify": refusal(verified, ours),
        "from_pretrained": refusal(blockformer.BlockformerDecoderForCausalLM.from_pretrained, ours),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official", "ours"]
    if "shape" in patterns:  # transformers itself compares shapes and dtypes first
        assert re.search(patterns["shape"], heard.pop("from_pretrained"))
    for door, text in heard.items():
        assert re.search(patterns.get(door, patterns[""]), text, re.DOTALL), (door, text)


@pytest.mark.parametrize("kind", ["adapter of MLX", "no config"])
def test_inspect_says_what_a_folder_without_config_is(tmp_path, models, kind, capsys):
    make, _ = KINDS[kind]
    make(shutil.copytree(models / "official", tmp_path / "folder"))
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "folder")])
    said = "an adapter of MLX" if kind == "adapter of MLX" else "no such file; name a folder"
    assert said in capsys.readouterr().err


def score(name, tensor):
    return [("score.weight", torch.randn(3, 64))] if "lm_head" in name else [(name, tensor)]


HEADS = {
    "a classifier's": (
        changed(score),
        r"the tensors have the head of Qwen3ForSequenceClassification. Write \"architectures\": "
        r"\[\"Qwen3ForSequenceClassification\"\], and \"num_labels\", the rows of its head",
        {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3},
    ),
    "a language model's": (
        lambda folder: edit_config(folder, architectures=["Qwen3ForSequenceClassification"]),
        r"The tensors fit if config.json has \"architectures\": \[\"Qwen3ForCausalLM\"\]",
        {"architectures": ["Qwen3ForCausalLM"]},
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_another_class(tmp_path, models, kind):
    make, said, entries = HEADS[kind]
    folder = shutil.copytree(models / "official", tmp_path / "folder")
    make(folder)
    wanted = stored(folder)
    assert re.search(said, refusal(from_official, folder))
    found = mend(folder, tmp_path / "new")
    assert f"the tensors belong to {entries['architectures'][0]}" in sentences(found)
    written_entries = json.loads((tmp_path / "new" / "config.json").read_text())
    assert entries.items() <= written_entries.items()
    assert stored(tmp_path / "new") == wanted
    assert from_official(tmp_path / "new").config.num_labels == entries.get("num_labels", 2)


def test_a_head_with_something_in_front_of_its_name_is_not_called_missing(tmp_path, models):
    folder = shutil.copytree(models / "official", tmp_path / "folder")
    changed(lambda name, each: [(f"model.{name}", each)])(folder)
    said = refusal(from_official, folder)
    assert "'model.lm_head.weight' is the head of Qwen3ForCausalLM, with something in front of its name" in said
    assert "tie_word_embeddings" not in said


def resized(name):
    def make(folder):
        edit_tensors(folder, lambda all_: {**all_, name: torch.cat([all_[name], all_[name][:9]])})

    return make


MISFITS = {
    "one side resized": (
        resized("lm_head.weight"),
        "only one of embeddings and head was resized, to 208 rows",
        "doctor",
    ),
    "the other": (resized("model.embed_tokens.weight"), "only one of embeddings and head was resized", "doctor"),
    "transposed": (
        changed(lambda name, each: [(name, each.T.contiguous() if "_proj" in name else each)]),
        "hey are transposed: save the weights of nn.Linear",
        "transposed",
    ),
    "one process of two": (
        changed(lambda name, each: [(name, each[: len(each) // 2].clone() if "gate" in name else each)]),
        "ach is 1/2 of the model's along one axis, as a process of tensor parallelism",
        "tensor parallelism",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_shapes_that_show_how_they_came_about(tmp_path, models, kind):
    make, said, at_the_door = MISFITS[kind]
    folder = shutil.copytree(models / "official", tmp_path / "folder")
    make(folder)
    assert said in sentences(diagnose(folder))
    assert at_the_door in refusal(convert, folder, tmp_path / "new")


def test_a_cast_to_eight_bits_is_named(tmp_path, models):
    folder = shutil.copytree(models / "official", tmp_path / "folder")
    changed(lambda name, each: [(name, each.to(torch.float8_e4m3fn) if "_proj" in name else each)])(folder)
    assert "14 weights are float8_e4m3fn without a scale" in sentences(diagnose(folder))


def test_zeros_verify_nothing(tmp_path, models):
    folder = shutil.copytree(models / "official", tmp_path / "folder")
    changed(lambda name, each: [(name, each if "embed" in name else torch.zeros_like(each))])(folder)
    report = convert(folder, tmp_path / "new")
    assert "the original's outputs are all zero, so nothing could be compared" in report.not_verified


def test_a_config_of_few_bits_before_plain_weights_of_ours(tmp_path, models):
    folder = shutil.copytree(models / "ours", tmp_path / "folder")
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    load = blockformer.BlockformerDecoderForCausalLM.from_pretrained
    assert "the model was merged or dequantized, so remove quantization_config" in refusal(load, folder)
