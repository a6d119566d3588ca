"""The base of every model: initialisation, what the library may do with it, and its place in a repo."""

import contextlib
import json
import re
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention import Attention
from .awq_linear import QuantizedLinear
from .compat import OutputRecorder, keep_dtypes_on_disk
from .inference import check_stays
from .joint import arrange_weights, drop_stale_joints, separate_weights
from .layer import Layer
from .positions import ComputedPositions


class WeightsError(ValueError, RuntimeError):
    """A checkpoint's weights are not the model's. Also a RuntimeError, which is what transformers raises."""


class BlockformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and placement, from transformers; weights drawn as `initializer_range` says."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Layer",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # A name for each recorder: self- and cross-attention are one class.
    _can_record_outputs = {
        "hidden_states": Layer,
        "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="cross_attn"),
    }

    uploader: Callable | None = None
    """What `push_to_hub` uploads with; set by the package, which stands above this module. A repo has none."""

    def __init__(self, config):
        super().__init__(config)
        if config.float32_down_proj:
            self._keep_in_fp32_modules = {"down_proj"}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library greps the class's own module for the call; here it stands in attention.py.
        return True

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Refuse integers in place of weights, and the other way round, before any tensor is read."""
        if not load_config.is_quantized:
            source = load_config.pretrained_model_name_or_path
            _check_kinds(model, _kinds_of(state_dict, checkpoint_files), source)
        info, on_disk = PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )
        keep_dtypes_on_disk(model, QuantizedLinear, on_disk)
        return info, on_disk

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        """Refuse a checkpoint that does not fill the model, where the library warns and draws the rest at random."""
        source, wrong = load_config.pretrained_model_name_or_path, loading_info.mismatched_keys
        if wrong and not load_config.ignore_mismatched_sizes:
            lines = [f"{name} is {list(theirs)}, the model's is {list(ours)}" for name, theirs, ours in sorted(wrong)]
            raise WeightsError(
                f"{source}: wrong shapes; does config.json belong to these weights? (ignore_mismatched_sizes=True "
                f"draws them anew, a head of other labels, say):{_listed(lines)}"
            )
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        missing = sorted(set(loading_info.missing_keys) - _new_parts(model, loading_info.missing_keys))
        if load_config.is_quantized:  # scales and the like may be made after loading
            missing = [name for name in missing if name.endswith((".weight", ".bias"))]
        if missing:
            raise WeightsError(
                f"{source}: weights of {type(model).__name__} are missing; is the checkpoint whole, and one of this "
                "model? (To begin with random ones, build the model from its config and use "
                f"load_state_dict(..., strict=False)):{_listed(missing)}"
            )
        return loading_info

    def num_parameters(self, only_trainable=False, exclude_embeddings=False):
        """As the library counts them, and the weights of 4 bits, which are none of torch's parameters."""
        number = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        low = (module for module in self.modules() if isinstance(module, QuantizedLinear) and not only_trainable)
        return number + sum(module.in_features * module.out_features for module in low)

    def _apply(self, fn, recurse=True):
        check_stays(self, fn)
        super()._apply(fn, recurse)
        drop_stale_joints(self)
        return self

    def prepare_for_inference(self, second_copy: bool = False):
        """Make the model quicker where it only answers: weights lie as the processor multiplies them.

        That is bfloat16 and 4 bits, both on a CPU; elsewhere nothing changes. Saving still writes plain tensors. No
        gradients, adapters, casts or moves until `prepare_for_training`.

        Args:
            second_copy: hold bfloat16 weights twice: a second layout makes steps of a token, or up to four, quicker
                still. Only `prepare_for_training` gives it up again.

        Returns:
            The model, in evaluation mode.
        """
        self.eval()
        if not hasattr(self, "_trainable"):
            self._trainable = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        self.requires_grad_(False)
        arrange_weights(self, second_copy)
        return self

    def prepare_for_training(self):
        """Undo `prepare_for_inference`: plain weights, which learn again if they did before. Returns the model."""
        separate_weights(self)
        trainable = self.__dict__.pop("_trainable", ())
        for name, parameter in self.named_parameters():
            if name in trainable:
                parameter.requires_grad_(True)
        return self

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **options):
        """The last step of `push_to_hub`: with a card of ours, and no weight file of an earlier push left beside."""
        if BlockformerPreTrainedModel.uploader is None:
            return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **options)
        return BlockformerPreTrainedModel.uploader(self, working_dir, repo_id, files_timestamps, **options)

    def _init_weights(self, module):
        super()._init_weights(module)
        if self.config.initializer_range is None:
            _draw_by_inputs(module)
        if isinstance(module, ComputedPositions):
            # Not in a checkpoint, so it must be computed anew after the model was built on the meta device.
            init.copy_(module.inv_freq, module.compute_frequencies())
        if getattr(module, "logits_bias", None) is not None:
            init.zeros_(module.logits_bias)


def _kinds_of(state_dict, checkpoint_files) -> dict:
    """name -> dtype of tensors in memory, or of those in safetensors files, by their headers alone."""
    if state_dict is not None:
        return {name: str(getattr(tensor, "dtype", "")) for name, tensor in state_dict.items()}
    kinds: dict[str, str] = {}
    for path in checkpoint_files or ():
        if str(path).endswith(".safetensors"):
            with open(path, "rb") as file:
                header = file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000))
            # A damaged one is the library's to refuse.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
                entries = json.loads(header)
                kinds |= {name: entry["dtype"] for name, entry in entries.items() if name != "__metadata__"}
    return kinds


def _check_kinds(model, kinds, source) -> None:
    """Refuse integers for weights and anything but int32 for packed ones, which the library would cast.

    By their dtypes in safetensors ("I32", "U8", "BOOL") or torch ("torch.int32").
    """
    prefix = f"{model.base_model_prefix}."
    floats = {name.removeprefix(prefix) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    layers = (name for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
    packed = {f"{name.removeprefix(prefix)}.{part}" for name in layers for part in ("qweight", "qzeros")}
    cast = sorted(
        f"{name} is {kind}"
        for name, kind in kinds.items()
        if name.removeprefix(prefix) in packed and kind not in ("I32", "torch.int32")
    )
    if cast:
        raise WeightsError(f"{source}: packed weights that are not int32; has something cast them?{_listed(cast)}")
    wrong = sorted(
        f"{name} is {kind}"
        for name, kind in kinds.items()
        if name.removeprefix(prefix) in floats and re.match(r"(torch\.)?(u?int|bool|[IU]\d|BOOL)", kind)
    )
    if wrong:
        raise WeightsError(
            f"{source}: integers in place of floating-point weights; was the checkpoint quantized, and its "
            f"quantization_config lost?{_listed(wrong)}"
        )


def _new_parts(model, missing) -> set:
    """Which of the missing weights a good checkpoint may lack: they are made for what it is loaded for.

    A head and a pooler, where the checkpoint is of another class; cross-attention, where there is none of it yet.
    """
    body = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    new = set()
    if type(model).__name__ not in (model.config.architectures or ()):
        new |= {name for name in missing if not name.startswith(body) or name.startswith(f"{body}pooler.")}
    if model.config.add_cross_attention:
        cross = {name for name in model.state_dict() if ".cross_attn" in name}
        new |= cross if cross <= set(missing) else set()
    return new


def _listed(lines, limit=20) -> str:
    """Indented lines for an error message; past `limit` lines only the number of the others."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in lines[:limit] + more)


def _draw_by_inputs(module) -> None:
    """Weights with the deviation 1/sqrt(inputs), embeddings with 1, as T5 draws them (Raffel et al., 2020).

    Embeddings that are scaled are drawn so that they have 1 after it. A module that is to differ has an
    `initializer_factor`; of remote code the library does not ask what holds a module.
    """
    factor = getattr(module, "initializer_factor", 1.0)
    if isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear):
        init.normal_(module.weight, std=factor * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=factor)
