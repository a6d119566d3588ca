"""The base of every model: initialisation, what the library may do with it, and its place in a repo."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .axes import axes
from .compat import OutputRecorder, tell_peft
from .layer import Layer, layer_class
from .runtime import Runtime, by_package

_UNPREPARED = "prepare_for_{0} is not in a repo's code: install blockformer, import it, and load the model again."


class WeightsError(ValueError, RuntimeError):
    """A checkpoint's weights are not the model's. Also a RuntimeError, which is what transformers raises.

    Attributes:
        unexpected: names of weights in the checkpoint that the model does not have.
    """

    unexpected: tuple[str, ...] = ()


class BlockformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and placement, from transformers; weights drawn as `initializer_range` says."""

    runtime: Runtime
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Layer",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # By the module's name: self- and cross-attention are one class, and the config may have its own copy of a part's.
    _can_record_outputs = {
        "hidden_states": Layer,
        "attentions": OutputRecorder(None, index=1, class_name=".self_attn"),
        "cross_attentions": OutputRecorder(None, index=1, class_name=".cross_attn"),
    }

    def __init__(self, config):
        _check_topology(type(self), config)
        for name, each in axes(type(config)).items():  # once more: a field may have been set by hand
            each.check(name, vars(config)[name])
        super().__init__(config)
        tell_peft(config.model_type)
        self.runtime = self.usual_runtime()
        self._no_split_modules = (layer_class(config).__name__,)
        if config.float32_down_proj:
            self._keep_in_fp32_modules = {"down_proj"}
        if config.router_selection_bias:  # a rounded one would choose other experts
            self._keep_in_fp32_modules_strict = {"gate"}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library greps the class's own module for the call; here it is in attention.py.
        return True

    @by_package
    def usual_runtime(self):
        """How a model runs that nothing has prepared."""
        return Runtime()

    @by_package
    def prepare_for_inference(self, **options):
        """Make this model faster at inference: see `blockformer.prepare_for_inference`, which needs the package."""
        raise NotImplementedError(_UNPREPARED.format("inference"))

    @by_package
    def prepare_for_training(self):
        """Make this model ready for training: see `blockformer.prepare_for_training`, which needs the package."""
        raise NotImplementedError(_UNPREPARED.format("training"))

    save_pretrained = by_package(PreTrainedModel.save_pretrained)
    push_to_hub = by_package(PreTrainedModel.push_to_hub)
    load_state_dict = by_package(PreTrainedModel.load_state_dict)

    @classmethod
    @by_package
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a model as transformers does, which would draw missing weights at random; here they are refused.

        Raises:
            WeightsError: weights are missing.
        """
        source, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        _check_missing(model, source or "state_dict", info["missing_keys"], sorted(info["unexpected_keys"]))
        for name, module in model.named_modules():
            if hasattr(module, "after_loading"):
                module.after_loading(name)
        return (model, info) if wants_info else model

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As the library does, and what layers take of the tokens, too."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for part in [each for each in self.modules() if hasattr(each, "resize_tables")]:
            part.resize_tables(self._get_resized_embeddings, embeddings.num_embeddings, mean_resizing)
        return embeddings

    def num_parameters(self, only_trainable=False, exclude_embeddings=False):
        """As the library counts them, and the 4-bit weights, which are not parameters in torch's sense."""
        number = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        low = (module for module in self.modules() if hasattr(module, "qweight") and not only_trainable)
        return number + sum(module.in_features * module.out_features for module in low)

    def own_loss(self):
        """The loss that a user has chosen by `loss_function` or `loss_type`; None where it is the usual one."""
        name, kind = type(self).__name__, getattr(self, "loss_type", None)
        is_usual = kind is None or (kind in name and self.loss_function.__module__.startswith("transformers."))
        return None if is_usual and not hasattr(self, "_loss_function") else self.loss_function

    def _init_weights(self, module):
        super()._init_weights(module)
        if self.config.initializer_range is None:
            _draw_by_inputs(module)
        if hasattr(module, "init_tensors"):  # weights that the library cannot know, buffers that no checkpoint holds
            module.init_tensors()


def _check_topology(model_class, config) -> None:
    """Refuse a config of another topology: such a model would train, and nothing could load it again."""
    wanted = model_class.config_class
    if wanted is not None and getattr(config, "auto_classes", {}).get("AutoModel") != wanted.auto_classes["AutoModel"]:
        names = {target.rpartition(".")[2]: None for target in [*getattr(config, "auto_classes", {}).values()][1:]}
        fix = f"use {' or '.join(names)}, or turn a model into another topology with blockformer.reshape"
        official = "blockformer.preset makes one, and blockformer.from_official loads an official checkpoint"
        what = f"{model_class.__name__} needs a {wanted.__name__}, not a {type(config).__name__}"
        raise ValueError(f"{what}: {fix if names else official}.")


def _check_missing(model, source, missing, unexpected) -> None:
    missing = sorted(set(missing) - _new_parts(model, missing))
    if hasattr(model, "is_quantized"):  # scales and the like may be made after loading
        missing = [name for name in missing if name.endswith((".weight", ".bias"))]
    if not missing:
        return
    fix = "to begin with random ones, build the model from its config and use load_state_dict(..., strict=False)"
    question, others = "the checkpoint is incomplete, or for another class", ""
    if len(missing) <= 3 * len(unexpected):  # queries, keys and values may be one weight elsewhere
        question = "the checkpoint has names of another layout or release: `blockformer convert` reads other layouts"
        others = f"\nIt has instead:{listed(unexpected)}"
    lacking = f"{source}: weights of {type(model).__name__} are missing; {question} ({fix}):{listed(missing)}"
    error = WeightsError(lacking + others)
    error.unexpected = tuple(unexpected)
    raise error


def _new_parts(model, missing) -> set:
    """Missing weights that may be new: head and pooler of another class than the checkpoint's, cross-attention."""
    body = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    is_other = type(model).__name__ not in (model.config.architectures or ())
    new = {name for name in missing if is_other and (not name.startswith(body) or name.startswith(f"{body}pooler."))}
    for mark in [".cross_attn"] * model.config.add_cross_attention + ["mtp."]:
        part = {name for name in model.state_dict() if mark in name}
        new |= part if part <= set(missing) else set()
    return new


def listed(lines, limit=20) -> str:
    """Indented lines for an error message; past `limit` lines only the number of the others."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in lines[:limit] + more)


def _draw_by_inputs(module) -> None:
    """Weights with the deviation 1/sqrt(inputs), embeddings with 1, as T5 draws them (Raffel et al., 2020).

    Scaled embeddings have 1 after the factor. A module that is to differ has an `initializer_factor`.
    """
    factor = getattr(module, "initializer_factor", 1.0)
    if isinstance(module, nn.Linear) and module.weight is not None:
        init.normal_(module.weight, std=factor * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=factor)
