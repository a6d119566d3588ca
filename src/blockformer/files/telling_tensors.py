"""What names and shapes of tensors show that no library reads as a model, each as a sentence and a remedy."""

import re
from collections.abc import Collection, Iterable, Mapping

from .container_kinds import MEGATRON_REMEDY, OLDER
from .errors import listed, shown
from .quantized import lost_quantization
from .safetensors_io import HasHeader

FLAT = ("flat_param", "_flat_param")
MEGATRON = (".self_attention.linear_qkv.weight", ".self_attention.linear_proj.weight")
OF_FLAX = re.compile(r"[./](kernel|embedding|scale)$")
OF_TENSORFLOW = re.compile(r"/(kernel|bias|gamma|beta|weight|embeddings?)(:0)?$")
OF_LORA = re.compile(r"\.lora_[AB](\.[^.]+)?\.weight$|\.lora_[abAB]$|\.lora_[ab]\.weight$")
"""Names of the matrices of adapters: PEFT's, torchtune's, LitGPT's."""
OF_AN_OPTIMIZER = re.compile(r"(^|\.)(exp_avg(_sq)?|momentum_buffer|max_exp_avg_sq|step)$")
UNSHARD = (
    "save the whole model: FULL_STATE_DICT of FSDP, or get_model_state_dict of torch.distributed.checkpoint with "
    "StateDictOptions(full_state_dict=True, cpu_offload=True)"
)
GATHER = (
    "save again: save_pretrained under ZeRO-3 needs stage3_gather_16bit_weights_on_model_save; or name the folder of "
    "the run's own checkpoint (global_step...), which blockformer doctor joins"
)


def of_another_framework(names: Collection[str], known: Collection[str] = ()) -> tuple[str, str] | None:
    """Names that FSDP, Megatron-LM, Flax, TensorFlow or an optimizer gives to tensors, or None.

    Args:
        names: of the tensors.
        known: names that a model has.
    """
    flat = [name for name in names if name.rpartition(".")[2] in FLAT]
    if flat:
        said = f"FSDP has saved flat parameters ({shown(flat[0])}), each a part of many weights without their names"
        return said, UNSHARD
    megatron = [name for name in names if name.endswith(MEGATRON) and name not in known]
    if megatron:
        return f"the tensors have the names of Megatron-LM ({shown(megatron[0])})", MEGATRON_REMEDY
    if names and all(OF_AN_OPTIMIZER.search(name) for name in names):
        said = f"the file holds the state of an optimizer ({shown(next(iter(names)))}), and no model"
        return said, "name the file or folder with the model"
    return _of_jax_or_tensorflow(names, known)


def _of_jax_or_tensorflow(names: Collection[str], known: Collection[str]) -> tuple[str, str] | None:
    unknown = [name for name in names if name not in known]
    kernels = [name for name in unknown if name.endswith(("kernel", "kernel:0"))]
    if not kernels or 2 * len(unknown) < len(names):
        return None
    is_flax = any(OF_FLAX.search(name) and not name.endswith("kernel") for name in unknown)
    is_flax = is_flax or not any(OF_TENSORFLOW.search(name) for name in unknown)
    framework, option = ("Flax", "from_flax") if is_flax else ("TensorFlow", "from_tf")
    said = f"the tensors have the names of {framework} ({shown(kernels[0])}), whose matrices are transposed"
    return said, f"{OLDER.format(option)}; or name and transpose each with blockformer doctor --map NAMES.json"


def computed_weights(names: Iterable[str]) -> tuple[str, str] | None:
    """Parts of a weight that PyTorch's parametrizations compute, LoRA in jina-embeddings-v3 for one, or None.

    Args:
        names: of the tensors.
    """
    found = next((name for name in names if ".parametrizations." in name), None)
    if found is None:
        return None
    said = f"{shown(found)} is part of a weight that is computed from several (adapters, say)"
    return said, "load the model with its own code, merge them into plain weights, save it and convert that"


def unmerged_adapter(names: Collection[str]) -> tuple[str, str] | None:
    """Matrices of an adapter in place of a model, or among its weights, or None.

    Args:
        names: of the tensors.
    """
    found = [name for name in names if OF_LORA.search(name) and ".parametrizations." not in name]
    if not found or any(".base_layer." in name for name in names):  # a whole model as PEFT wraps it: `of_a_wrapper`
        return None
    count = "1 matrix" if len(found) == 1 else f"{len(found)} matrices"
    if len(found) == len(names):
        said = f"the tensors are only the {count} of a LoRA adapter, without the model"
        fix = "save it with save_pretrained of the PEFT model, with adapter_config.json; or save merge_and_unload(); "
        return said, fix + "torchtune and LitGPT merge theirs themselves"
    said = f"an adapter of {count} is stored with the weights, not merged ({shown(found[0])})"
    fix = "save the model that merge_and_unload() of PEFT returns, or merge it with blockformer doctor FOLDER "
    return said, fix + "--lora-scale ALPHA/R --mend NEW"


def not_a_model(tensors: Mapping[str, HasHeader], is_quantized: bool) -> tuple[str, str] | None:
    """Why libraries cannot read these tensors as a model, and what to do; None if nothing shows that.

    Args:
        tensors: name -> header.
        is_quantized: whether the config says that the weights are.
    """
    lost = None if is_quantized else lost_quantization(tensors)
    return lost or empty_tensors(tensors) or of_another_framework(tensors) or unmerged_adapter(tensors)


def empty_tensors(tensors: Mapping[str, HasHeader]) -> tuple[str, str] | None:
    """Weights without elements, which ZeRO-3 saves for the weights of other processes, or None.

    Args:
        tensors: name -> header.
    """
    empty = [name for name, info in tensors.items() if tuple(info.shape) == (0,) and name.endswith("weight")]
    if not empty:
        return None
    number = "1 tensor is" if len(empty) == 1 else f"{len(empty)} tensors are"
    return f"{number} empty, of shape [0]:{listed(map(shown, empty), 4)}", GATHER
