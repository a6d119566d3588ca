"""The one place that depends on the releases of the libraries: needed names, changed homes and private interfaces.

The private names that a repo's code uses, and what happens once one is gone: see the package's `engine/__init__.py`.
"""

import functools
import inspect
import sys

import torch
import transformers

OLDEST, NEWEST = "5.5", "5.24"  # the releases of transformers that this code is tested with
_MODULES = frozenset("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj norm".split())
_NORMS = [f"{of}_{at}_norm" for of in ("self_attn", "cross_attn", "mlp") for at in ("input", "pre", "output", "post")]

try:
    if [int(part) for part in transformers.__version__.split(".")[:2]] < [int(part) for part in OLDEST.split(".")]:
        raise ImportError(f"it needs {OLDEST} at least")
    # Everything that the model's code imports from the library, so that one sentence can name what a release lacks.
    from transformers import AttentionInterface, GenerationConfig, PretrainedConfig, PreTrainedModel, initialization
    from transformers.activations import ACT2FN
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
    from transformers.generation import GenerationMixin
    from transformers.integrations import use_experts_implementation
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
    from transformers.masking_utils import create_bidirectional_sliding_window_mask as create_two_sided_mask
    from transformers.masking_utils import create_sliding_window_causal_mask as create_sliding_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ
    from transformers.utils import can_return_tuple, logging
    from transformers.utils.output_capturing import OutputRecorder, capture_outputs
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"This model's code does not run on transformers {transformers.__version__} ({error}). It is tested with "
        f"transformers {OLDEST} to {NEWEST}: pip install 'transformers=={NEWEST}.*'. For a newer release, "
        "export the model again with a newer Blockformer."
    ) from error

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What the library calls a cache, in arguments and in outputs: `past_key_values` up to 5.23."""


def is_mapped(tensor) -> bool:
    """Whether `torch.func.vmap` holds several tensors behind this one, whose values cannot be looked at."""
    unwrap = getattr(torch.func, "debug_unwrap", None)  # of PyTorch 2.7 and later
    return unwrap is not None and not torch.compiler.is_compiling() and unwrap(tensor).dim() > tensor.dim()


def is_readable(tensor) -> bool:
    """Whether looking at a tensor's values waits for no accelerator, spoils no graph and is possible."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_mapped(tensor)
    return tensor.is_cpu and not (is_traced or isinstance(tensor, torch._subclasses.FakeTensor))


def takes_cache(forward):
    """A `forward` whose `past_key_values` may be called `cache`. (Continuous batching calls other things so.)"""

    @functools.wraps(forward)
    def with_either_name(self, *args, **kwargs):
        if isinstance(kwargs.get("cache", ...), (Cache, type(None))) and (cache := kwargs.pop("cache")) is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("cache and past_key_values are two names for one argument: pass only one.")
            kwargs["past_key_values"] = cache
        return forward(self, *args, **kwargs)

    with_either_name.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # read at each token
    return with_either_name


def generation_field_names() -> set:
    """Generation settings that old config files carry; the base class moves them to the generation config."""
    defaults = getattr(GenerationConfig, "_get_default_generation_params", None)
    return set(defaults() if defaults is not None else GenerationConfig().to_dict())


def announce_language_model(config_class) -> None:
    """Enter a topology's language model into the library's list by which `Trainer` and lm-eval tell its kind."""
    for auto_class, names in (("AutoModelForCausalLM", CAUSAL), ("AutoModelForSeq2SeqLM", SEQ_TO_SEQ)):
        if auto_class in config_class.auto_classes:
            names[config_class.model_type] = config_class.auto_classes[auto_class].rpartition(".")[2]


def tell_peft(model_type: str) -> None:
    """Give PEFT, if imported, default targets for a model type: the entry that most nearly names our modules.

    PEFT, which takes seconds to import, has a table for each of its methods. Other threads may add to one meanwhile.
    """
    for name, table in list(vars(sys.modules.get("peft.utils.constants", object)).items()):
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and model_type not in table:
            lists = [each for each in table.copy().values() if isinstance(each, list) and _MODULES.intersection(each)]
            if lists:
                names = max(lists, key=lambda names: len(_MODULES.intersection(names)) / len(names))
                table[model_type] = ["norm", *_NORMS] if "norm" in names else names


def causal_masks(config, hidden_states, attention_mask, past_key_values, position_ids) -> dict:
    """One causal mask for each of the config's layer types with keys, in the form that the attention backend wants.

    The library finds several sequences of a row by `position_ids` [B, T], so they are None where they are only counted.
    Of the states [B, T, C] it reads shape, dtype and device.
    """
    own, types = getattr(past_key_values, "self_attention_cache", past_key_values), config.layer_types
    is_usual = type(own) is DynamicCache and "sliding_attention" not in types and config._attn_implementation == "sdpa"
    if attention_mask is None and hidden_states.shape[1] == 1 and is_usual:
        return {"full_attention": None}  # one token sees all keys, as the library would work out
    given = {"config": config, "inputs_embeds": hidden_states, "attention_mask": attention_mask, CACHE: own}
    make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_mask}
    return {kind: made(**given, position_ids=position_ids) for kind, made in make.items() if kind in types}


def encoder_masks(config, hidden_states, attention_mask, sequences=None) -> dict:
    """One mask of an encoder's self-attention for each of the config's layer types.

    `sequences` [B, T] numbers the sequence of its row that a token belongs to, the only one it sees; None: one a row.
    """
    same = None if sequences is None else lambda row, head, query, key: sequences[row, query] == sequences[row, key]
    arguments = {"config": config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
    make = {"full_attention": create_bidirectional_mask, "sliding_attention": create_two_sided_mask}
    return {kind: make[kind](**arguments, and_mask_function=same) for kind in sorted(make.keys() & config.layer_types)}
