"""Runs the models on a device without hardware and says where they make the host wait; run by `test_device.py`.

Renaming PyTorch's spare backend cannot be undone, so this is a process of its own. Its output is JSON: for each case
the complaints, each with the operator and the line that called it, and how often.
"""

import json
import os
import sys
import traceback
from collections import Counter
from itertools import zip_longest

import torch
import transformers.masking_utils as masking_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers.cache_utils import DynamicLayer

import blockformer
from blockformer.engine import attention, runtime
from blockformer.model.stack import Stack

_setup_privateuseone_for_python_backend("fakegpu")
DEVICE = torch.device("fakegpu:0")
BATCH, LENGTH, VOCAB = 4, 12, 64
# What needs a value, or a number of values, on the host.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "bincount"}


class Complaints(TorchDispatchMode):
    """Lists what waits for the device, what crosses between devices, and float64 on the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if tensor.device.type == DEVICE.type]
        if name in READS and on_device:
            self._complain(f"{name} of {list(on_device[0].shape)}")
            return self._answer(name, on_device[0])
        if name in ("index", "index_put", "index_put_") and any(
            tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in args[1]
        ):
            self._complain(f"{name} by a mask of {list(args[1][0].shape)}")
            return args[0].flatten(0, args[1][0].dim() - 1) if name == "index" else args[0]
        if name == "repeat_interleave" and len(tensors) > 1 and (kwargs or {}).get("output_size") is None:
            self._complain("repeat_interleave by a tensor")
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in [*tensors, *outputs] if tensor.device.type != "meta"}
        if name in ("_to_copy", "copy_", "copy") and len(devices) > 1:
            self._complain(f"{name} between {sorted(devices)}")
        elif any(tensor.dim() and tensor.device.type == "cpu" for tensor in outputs):
            self._complain(f"{name} makes a tensor on the CPU")
        if any(tensor.dtype is torch.float64 and tensor.device.type == DEVICE.type for tensor in outputs):
            self._complain(f"{name} makes float64")
        return result

    def _complain(self, what):
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        frames = [frame for frame in frames if os.path.basename(frame.filename) != os.path.basename(__file__)]
        place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"
        self.found.append(f"{what} at {place}")

    @staticmethod
    def _answer(name, tensor):
        if name == "nonzero":
            return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
        if name == "masked_select":
            return tensor.new_empty(tensor.numel())
        return 1.0 if tensor.dtype.is_floating_point else 1


def fake(mode, shape, dtype):
    with mode:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), DEVICE)


def on_device(model, mode):
    """The model, built on "meta", with fake tensors for its parameters and buffers."""
    made = {}

    def moved(tensor):
        if id(tensor) not in made:
            with no_dispatch():
                place = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = FakeTensor(mode, place, DEVICE)
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(moved(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer)
    return model


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
POSITIONS = {
    "rotary": {},
    "dynamic": {
        "position_type": "rotary",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "longrope": {"position_type": "rotary", "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}},
    "yarn": {"position_type": "rotary", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "learned": {},
    "sinusoidal": {},
    "relative_bias": {},
    "relative_bias_per_layer": {"position_type": "relative_bias", "relative_bias_per_layer": True},
    "relative_key": {},
    "relative_key_query": {},
}
ENCODER, DECODER = blockformer.BlockformerEncoderConfig, blockformer.BlockformerDecoderConfig
BOTH = blockformer.BlockformerEncoderDecoderConfig
START = {"decoder_start_token_id": 0}
# Of each topology: the config class, its settings, the positions, and the heads with the labels that each takes.
TOPOLOGIES = {
    "encoder": (
        ENCODER,
        {"pooler_act": "tanh", "norm_placement": "post", "final_norm": False},
        ("learned", "rotary", "sinusoidal", "relative_bias", "relative_key_query"),
        {
            "ForMaskedLM": {"labels": (BATCH, LENGTH)},
            "ForPreTraining": {"labels": (BATCH, LENGTH), "next_sentence_label": (BATCH,)},
            "ForNextSentencePrediction": {"labels": (BATCH,)},
            "ForSequenceClassification": {"labels": (BATCH,)},
            "ForTokenClassification": {"labels": (BATCH, LENGTH)},
            "ForQuestionAnswering": {"start_positions": (BATCH,), "end_positions": (BATCH,)},
        },
    ),
    "decoder": (
        DECODER,
        {"qk_norm": True},
        tuple(POSITIONS),
        {
            "ForCausalLM": {"labels": (BATCH, LENGTH)},
            "ForSequenceClassification": {"labels": (BATCH,)},
            "ForTokenClassification": {"labels": (BATCH, LENGTH)},
            "ForQuestionAnswering": {"start_positions": (BATCH,), "end_positions": (BATCH,)},
        },
    ),
    "sliding decoder": (DECODER, {"sliding_window": 4}, ("rotary",), {"ForCausalLM": {"labels": (BATCH, LENGTH)}}),
    "cross decoder": (
        DECODER,
        {"add_cross_attention": True, "norm_placement": "post", "final_norm": False},
        ("learned",),
        {"ForCausalLM": {"labels": (BATCH, LENGTH)}},
    ),
    "encoder-decoder": (
        BOTH,
        START,
        ("relative_bias", "learned", "sinusoidal", "rotary"),
        {
            "ForConditionalGeneration": {"labels": (BATCH, LENGTH)},
            "ForSequenceClassification": {"labels": (BATCH,)},
            "ForQuestionAnswering": {"start_positions": (BATCH,), "end_positions": (BATCH,)},
        },
    ),
}
INPUTS = ("plain", "mask", "positions", "packed")
# A loss in chunks, which takes the states of the labelled tokens alone.
CHUNKS = "loss in chunks"


def cases(every):
    """Each topology with every kind of inputs, and then a training step with each other position and head.

    Or fewer: answers without labels for two kinds of inputs, eager attention for one; positions and heads in pairs.
    """
    for topology, (config_class, settings, positions, heads) in TOPOLOGIES.items():
        kinds = INPUTS if topology in ("encoder", "decoder") else INPUTS[:2]
        first_head = next(iter(heads))
        chosen = [
            (positions[0], first_head, backend, inputs, labelled)
            for inputs in kinds
            for backend, labelled in (("sdpa", False), ("sdpa", True), ("eager", True))
            if every or inputs == "mask" or (labelled and backend == "sdpa") or (inputs == "plain" and not labelled)
        ]
        if "labels" in heads[first_head]:
            chosen.append((positions[0], first_head, "sdpa", CHUNKS, True))
        more = positions[1:], list(heads)[1:]
        pairs = [*zip_longest(more[0], []), *zip_longest([], more[1])] if every else zip_longest(*more)
        chosen += [(position or positions[0], head or first_head, "sdpa", "mask", True) for position, head in pairs]
        for position, head, backend, inputs, labelled in chosen:
            name = f"{topology} {head} {position} {backend} {inputs} {'step' if labelled else 'forward'}"
            model_class = getattr(blockformer, config_class.__name__.removesuffix("Config") + head)
            own = {**SIZES, "position_type": position, **POSITIONS[position], **settings}
            yield name, topology, model_class, own, backend, inputs, heads[head] if labelled else {}


def arguments(mode, topology, inputs, labels, grows=False):
    def whole(*shape, dtype=torch.int64):
        return fake(mode, shape, dtype)

    given = {"input_ids": whole(BATCH, LENGTH)}
    if topology != "encoder-decoder":
        given["token_type_ids"] = whole(BATCH, LENGTH)
    if inputs == CHUNKS:
        given["return_logits"] = False
    if inputs in ("mask", CHUNKS):
        given["attention_mask"] = whole(BATCH, LENGTH)
    if inputs in ("positions", "packed"):
        given["position_ids"] = whole(BATCH, LENGTH)
    if inputs == "packed":
        lengths = whole(3, dtype=torch.int32)
        given |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 8, "max_length_k": 8}
        given["seq_idx"] = whole(BATCH, LENGTH, dtype=torch.int32)
    if topology in ("sliding decoder", "cross decoder", "encoder-decoder") or (topology == "decoder" and not grows):
        given["use_cache"] = False  # the library's caches make an empty tensor of a list
    if topology == "cross decoder":
        given["encoder_hidden_states"] = whole(BATCH, 5, SIZES["hidden_size"], dtype=torch.float32)
        given["encoder_attention_mask"] = whole(BATCH, 5)
    if topology == "encoder-decoder" and ("labels" not in labels or len(labels["labels"]) == 1):
        given["decoder_input_ids"] = whole(BATCH, LENGTH)
    if topology == "encoder-decoder" and inputs == "mask":
        given["decoder_attention_mask"] = whole(BATCH, LENGTH)
    return given | {name: whole(*shape) for name, shape in labels.items()}


def complaints_of(topology, model_class, settings, backend, inputs, labels):
    mode, config = FakeTensorMode(), model_class.config_class(**settings)
    with torch.device("meta"):
        model = model_class(config)
    model.set_attn_implementation(backend)
    model = on_device(model, mode).train(bool(labels))
    given = arguments(mode, topology, inputs, labels)
    with mode, Complaints() as complaints, torch.set_grad_enabled(bool(labels)):
        try:
            outputs = model(**given)
            if labels and inputs != CHUNKS:  # that loss has taken its gradients on the way
                outputs.loss.backward()
        except Exception as error:  # tensors of two devices, say
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
            places = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames[-3:]]
            complaints.found.append(f"{type(error).__name__}: {str(error)[:300]} at {places}")
    return complaints.found


def go_on(model, mode, cache):
    """Three more tokens, each by itself."""
    for length in range(LENGTH + 1, LENGTH + 4):
        mask = fake(mode, (BATCH, length), torch.int64)
        cache = model(fake(mode, (BATCH, 1), torch.int64), attention_mask=mask, past_key_values=cache).past_key_values


def kernel(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """In the place of `varlen_attn`."""
    assert starts_q.device == query.device
    return torch.empty_like(query)


def noting(run_layers, seen):
    """The layers of a stack, which note how many rows and tokens they run for."""

    def run(hidden_states, *more):
        seen.append(hidden_states.shape[:2])
        return run_layers(hidden_states, *more)

    return run


def _without_lists(layer, key_states, value_states):
    """As the library's, which makes an empty tensor of a list."""
    layer.dtype, layer.device, layer.is_initialized = key_states.dtype, key_states.device, True
    layer.keys, layer.values = key_states[:, :, :0], value_states[:, :, :0]


def prepared():
    """The complaints about prepared models, whose padding is skipped: of a padded batch, and of what follows."""
    attention.DEVICE, attention.kernel = DEVICE.type, lambda: kernel
    attention._DTYPES, runtime._LEAST_WORK = (torch.float32,), 0
    for module in (attention, runtime):
        module.is_enabled = lambda: True  # though operators are looked at
    DynamicLayer.lazy_initialization = _without_lists
    results = {}
    for topology in ("encoder", "decoder", "encoder-decoder"):
        config_class, settings, _, heads = TOPOLOGIES[topology]
        own = {**SIZES, "position_type": "rotary" if topology == "decoder" else "learned", **settings}
        model_class = getattr(blockformer, config_class.__name__.removesuffix("Config") + next(iter(heads)))
        for inputs in ("mask", "packed") if topology != "encoder-decoder" else ("mask",):
            mode, seen = FakeTensorMode(), []
            with torch.device("meta"):
                model = model_class(config_class(**own)).prepare_for_inference()
            model = on_device(model, mode)
            first_stack = next(module for module in model.modules() if isinstance(module, Stack))
            first_stack.run_layers = noting(first_stack.run_layers, seen)  # a hook would see padding
            given = arguments(mode, topology, inputs, {}, grows=True)
            with mode, Complaints() as complaints, torch.no_grad():
                outputs = model(**given)
                first = Counter(complaints.found)
                complaints.found.clear()
                if topology == "decoder" and inputs == "mask":
                    go_on(model, mode, outputs.past_key_values)
            results[f"{topology} {inputs}"] = {"tokens": seen[0], "first": first, "then": complaints.found}
    return results


def main():
    if "--prepared" in sys.argv:
        json.dump(prepared(), sys.stdout, indent=1)
        return
    if "--library-too" in sys.argv:
        # On fake tensors the library's masks are made as for a graph; so they are made as on a real attention.
        masking_utils.is_tracing = lambda *_: False
    results = {}
    for name, *case in cases("--every" in sys.argv):
        results[name] = dict(Counter(complaints_of(*case)))
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
