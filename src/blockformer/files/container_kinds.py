"""The kinds of files that libraries cannot read as a model's weights: what each is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OLDER = "transformers before 5 converts it: the Auto class's from_pretrained(FOLDER, {}=True).save_pretrained(NEW)"
JOIN = "blockformer doctor {folder} --mend NEW writes a plain checkpoint of it"
GGUF_REMEDY = (
    "make plain weights of it with transformers and the package gguf: model = AutoModelForCausalLM.from_pretrained("
    "'{folder}', gguf_file='{name}'), model.hf_quantizer = None, del model.config.quantization_config, "
    "model.save_pretrained(NEW); the tokenizer likewise with AutoTokenizer"
)

ZERO_REMEDY = (
    "join them with DeepSpeed's own program: python -m deepspeed.utils.zero_to_fp32 {folder} NEW --safe_serialization "
    "(the folder has it as zero_to_fp32.py too, which is code of that folder)"
)


@dataclass(frozen=True)
class Container:
    """A kind of files that libraries cannot read as a model's weights.

    Attributes:
        name: of the kind, which does not change between releases.
        starts: how the names of its files or folders begin.
        ends: how they end.
        inside: a pattern of a file that a folder of such a name must hold; "" for none.
        what: it is, in words.
        remedy: what to do; `{name}` and `{folder}` are filled in.
        is_pickled: whether doctor reads them as any pickled file.
    """

    name: str
    starts: tuple[str, ...]
    what: str
    remedy: str
    is_pickled: bool = False
    ends: tuple[str, ...] = ()
    inside: str = ""

    def shown_by(self, names: Iterable[str], folder: Path) -> str | None:
        """The first of these names in a folder that shows it, or None."""
        named = (name for name in sorted(names) if name.startswith(self.starts) or name.endswith(self.ends))
        return next((name for name in named if not self.inside or any((folder / name).glob(self.inside))), None)


EXPORTED = {
    "TensorRT": (".engine", ".plan"),
    "Paddle": (".pdparams", ".pdiparams"),
    "ExecuTorch": (".pte",),
    "Core ML": (".mlpackage", ".mlmodel", ".mlmodelc"),
    "TensorFlow Lite": (".tflite",),
    "llamafile": (".llamafile",),
    "OpenVINO": ("openvino_model.xml", "openvino_model.bin"),
}
"""A program that runs models -> how the names of its files end."""
ZERO = "these are the parts that DeepSpeed ZeRO saves"
MEGATRON = "common.pt"
"""What Megatron-LM writes next to the parts of a distributed checkpoint, whose names and layers are its own."""
MEGATRON_SAID = "this is a checkpoint of Megatron-LM"
MEGATRON_REMEDY = "convert it with the tool of its framework (Megatron-Bridge, NeMo) to a Hugging Face folder"
CONTAINERS = (
    Container(
        "tensorflow",
        (),
        "these are weights for TensorFlow",
        "take the weights for PyTorch; of BERT and its kind, transformers before 5 has a program for each "
        "(convert_bert_original_tf_checkpoint_to_pytorch)",
        ends=(".ckpt.index", ".ckpt.meta", "saved_model.pb", ".weights.h5", ".keras"),
    ),
    Container("tensorflow", ("tf_model",), "these are weights for TensorFlow", OLDER.format("from_tf")),
    Container("flax", ("flax_model",), "these are weights for Flax", OLDER.format("from_flax")),
    Container("rust", ("rust_model",), "these are weights for rust-bert", "name the checkpoint they were made of"),
    Container(
        "universal",
        ("latest_universal",),
        "this is a universal checkpoint of DeepSpeed, which only its training reads",
        "name the folder that it was made of (global_step...), whose parts blockformer doctor joins",
        ends=("_universal",),
    ),
    Container(
        "pipeline",
        ("global_step",),
        "these are the layers that DeepSpeed saves with pipeline parallelism",
        "convert them with the tool of the training code to a Hugging Face folder",
        inside="layer_*model_states.pt",
    ),
    Container("zero", ("global_step",), ZERO, JOIN, inside="*_states.pt"),
    Container("zero", ("zero_pp_rank", "bf16_zero_pp_rank"), ZERO, JOIN),
    Container(
        "fsdp",
        ("pytorch_model_fsdp",),
        "these are the parts that FSDP saves",
        f"join them: accelerate merge-weights {{folder}}/{{name}} {{folder}}, or {JOIN}",
        inside="*",
    ),
    Container(
        "deepspeed",
        (),
        "these are the weights that DeepSpeed saves",
        JOIN,
        is_pickled=True,
        ends=("_model_states.pt",),
    ),
    Container("megatron", ("release",), MEGATRON_SAID, MEGATRON_REMEDY, inside="mp_rank_*/model_optim_rng.pt"),
    Container(
        "megatron",
        ("mp_rank_", "iter_0", "model_optim_rng", MEGATRON),
        MEGATRON_SAID,
        MEGATRON_REMEDY,
    ),
    Container("dcp", (".metadata",), "this is a distributed checkpoint (DCP)", JOIN),
    Container(
        "dcp-parts",
        (),
        "these are parts of a distributed checkpoint (DCP) without .metadata, which says what is in them",
        "copy .metadata from the folder where they were saved; an interrupted save has none: take one from before",
        ends=(".distcp",),
    ),
    Container(
        "litgpt-lora",
        ("lit_model.pth.lora",),
        "these are LoRA weights of LitGPT, without the model",
        "merge them: litgpt merge_lora {folder}; and name the folder again, which has lit_model.pth then",
    ),
    Container(
        "litgpt",
        ("lit_model.pth",),
        "this is a checkpoint of LitGPT",
        "blockformer doctor {folder} --mend NEW writes it as the official class that computes the same",
        is_pickled=True,
    ),
    Container(
        "consolidated",
        ("consolidated",),
        "these are weights in the layout of their maker's own code, whose queries and keys have another order",
        "name the repo in transformers' layout",
    ),
    Container(
        "onnx", ("onnx", "model.onnx"), "this is a model for ONNX", "name the checkpoint that it was exported from"
    ),
    Container(
        "mlx", ("weights.npz",), "these are weights for MLX", "name the checkpoint that they were converted from"
    ),
    Container(
        "numpy",
        (),
        "these are arrays of NumPy",
        "load them with numpy.load, and save them with safetensors.numpy.save_file as model.safetensors",
        ends=(".npz",),
    ),
    Container(
        "orbax",
        ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process"),
        "this is a checkpoint of Orbax, for JAX",
        "name the checkpoint that it was converted from, or save it in transformers' layout with its training code",
    ),
    Container(
        "nemo",
        (),
        "this is an archive of NeMo",
        "export it with NeMo to a Hugging Face folder: nemo.collections.llm.export_ckpt(FILE, target='hf')",
        ends=(".nemo",),
    ),
    Container(
        "gguf",
        (),
        "this is a GGUF file for llama.cpp",
        GGUF_REMEDY,
        ends=(".gguf",),
    ),
    *(
        Container(
            "exported", (), f"this is a model for {program}", "name the checkpoint that it was exported from", ends=ends
        )
        for program, ends in EXPORTED.items()
    ),
    Container(
        "diffusers-lora",
        ("pytorch_lora_weights",),
        "these are LoRA weights of diffusers, for a model of pictures",
        "diffusers loads them; Blockformer converts models of text",
    ),
    Container(
        "ollama",
        ("Modelfile",),
        "this is a recipe of Ollama, and the weights lie elsewhere",
        "name the checkpoint that its line FROM leads to; of a GGUF file, the one that it was made of",
    ),
    Container(
        "archive",
        (),
        "this is an archive",
        "unpack it, and name the folder that comes out of it",
        ends=(".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".7z", ".rar"),
    ),
)
