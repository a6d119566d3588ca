"""What names and shapes of tensors show that no library reads as a model, each as a sentence and a remedy."""

from collections.abc import Collection, Mapping

from .errors import listed, shown
from .safetensors_io import HasHeader

FLAT = ("flat_param", "_flat_param")
MEGATRON = (".self_attention.linear_qkv.weight", ".self_attention.linear_proj.weight")
UNSHARD = (
    "save the whole model: FULL_STATE_DICT of FSDP, or get_model_state_dict of torch.distributed.checkpoint with "
    "StateDictOptions(full_state_dict=True, cpu_offload=True)"
)
GATHER = (
    "save again: save_pretrained under ZeRO-3 needs stage3_gather_16bit_weights_on_model_save; or name the folder of "
    "the run's own checkpoint (global_step...), which blockformer doctor joins"
)


def of_another_framework(names: Collection[str], known: Collection[str] = ()) -> tuple[str, str] | None:
    """Names that FSDP or Megatron-LM gives to matrices of its own, or None.

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
        fix = "convert it with the tool of its framework (Megatron-Bridge, NeMo) to a Hugging Face folder"
        return f"the tensors have the names of Megatron-LM ({shown(megatron[0])})", fix
    return None


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
