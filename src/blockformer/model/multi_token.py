"""Layers that predict further tokens (DeepSeek-AI, 2024, arXiv 2412.19437, section 2.2: multi-token prediction, MTP).

Layer k reads the states of layer k - 1 (layer 0 is the whole model) and the tokens k places on, and predicts the tokens
k + 1 places on, through the model's own embeddings and head. It teaches states to look ahead, and drafts texts.

B batch, T length, C hidden size, V vocabulary, n layers that predict further.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.generation import CandidateGenerator

from .axes import BLOCKS, Part, axis
from .losses import IGNORED, count_of
from .normalization import make_norm
from .positions import flattened_positions, starts_of

# What no test has together with these layers.
_EXCLUDED = (
    *("attention_type", "residual", "token_embedding_size", "embedding_norm", "num_hidden_groups", "pruned_heads"),
    *("add_cross_attention", "bidirectional", "linear_bits", "type_vocab_size", "task_type_vocab_size"),
    "token_types_as_tokens",
)


@dataclass(eq=False, repr=False)
class MultiTokenFields(Part):
    """The fields of layers that predict further tokens."""

    num_nextn_predict_layers: int = axis(
        0, "an integer of 0 or more", "head", "layers that each predict one token further; 0 means none"
    )
    nextn_layer: str = axis("last", ("last", "first"), "head", "the layer of the model that these are like")
    nextn_final_norm: str = axis("own", ("own", "shared"), "head", "their last norm: each its own, or the model's")
    nextn_loss_weight: float = axis(0.3, "a number of 0 or more", "training", "factor of these layers' mean loss")

    def check(self):
        """Such a layer is like one of the model's, and reads tokens and states only."""
        if not self.num_nextn_predict_layers:
            return
        what = f"num_nextn_predict_layers={self.num_nextn_predict_layers}"
        for name in _EXCLUDED:
            value = getattr(self, name)
            if value and value != "sequential":
                raise ValueError(f"{what} is not supported with {name}={value!r}: leave one of the two out.")
        if self.position_type not in ("rotary", "none"):
            raise ValueError(f"{what} does not work with position_type={self.position_type!r}: use 'rotary' or 'none'.")
        if self.embedding_size != self.hidden_size:
            raise ValueError(f"{what} needs embedding_size={self.hidden_size}, which is hidden_size: leave it out.")
        if self.nextn_final_norm == "shared" and not self.final_norm:
            raise ValueError("nextn_final_norm='shared' needs final_norm=True: set it, or use 'own'.")
        if (kind := self.layer_types[_place(self)]) in BLOCKS["layer_types"]:
            fix = f"such layers are like the {self.nextn_layer} one, so let that be of 'full_attention'"
            raise ValueError(f"{what} with a {self.nextn_layer} layer of {kind!r} is not supported: {fix}.")


def _place(config) -> int:
    """The index of the layer that they are like."""
    return 0 if config.nextn_layer == "first" else -1


def _one_layer(config):
    """The config of a decoder with one layer, like the model's first or last, which gets states in place of tokens."""
    one, place = copy.deepcopy(config), _place(config)
    one.num_hidden_layers, one.num_nextn_predict_layers, one.vocab_size, one.pad_token_id = 1, 0, 1, None
    one.first_attention_norm, one.embedding_scale = True, None
    one.final_norm = config.final_norm and config.nextn_final_norm == "own"
    for name in ("layer_types", "mlp_layer_types", "mlp_layers", "rope_layers"):
        if getattr(config, name) is not None:
            setattr(one, name, [getattr(config, name)[place]])
    return one


class MultiTokenLayer(nn.Module):
    """One of these layers: a norm of the tokens and one of the states, both projected together, and a decoder of one.

    Args:
        decoder_class: what makes that decoder of its config; its final norm, if it has one, is the layer's.
    """

    def __init__(self, config, decoder_class):
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.embedding_norm, self.state_norm = make_norm(config, width), make_norm(config, width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.decoder = decoder_class(_one_layer(config))
        self.decoder.embed_tokens = None  # the model's own are read

    def forward(self, hidden_states, token_vectors, final_norm=None, **named):
        """States [B, T, C] of the layer before and vectors of the tokens further on [B, T, C] -> states [B, T, C].

        The decoder's `Stack.forward` gets `named`. `final_norm` is the model's, for a layer without one.
        """
        for name in ("_attn_implementation", "_experts_implementation"):  # which the model may have changed since
            if getattr(self.decoder.config, name, None) != (value := getattr(self.config, name, None)):
                setattr(self.decoder.config, name, value)
        both = torch.cat((self.embedding_norm(token_vectors), self.state_norm(hidden_states)), dim=-1)
        states = self.decoder(inputs_embeds=self.projection(both), return_dict=True, **named).last_hidden_state
        return states if final_norm is None else final_norm(states)


def multi_token_layers(config, decoder_class):
    """A model's `mtp`: layer k predicts k + 1 tokens on."""
    return nn.ModuleList(MultiTokenLayer(config, decoder_class) for _ in range(config.num_nextn_predict_layers))


def _shared_norm(model):
    """The final norm of a decoder with a head, which its `mtp` share; None if each has its own."""
    return model.model.norm if model.config.nextn_final_norm == "shared" else None


def _moved(values, filling=0):
    """What stands one place on: [B, T] or [B, T, C], with `filling` at the end."""
    return F.pad(values[:, 1:], (0, 0) * (values.dim() - 2) + (0, 1), value=filling)


def multi_token_loss(model, hidden_states, inputs: dict, targets, num_items_in_batch, label_smoothing: float, named):
    """The mean of the losses of a model's `mtp`, each divided as the model's own loss is.

    Args:
        model: a decoder with a language model head.
        hidden_states: its states [B, T, C].
        inputs: what its stack got by name: `input_ids` or `inputs_embeds`, `attention_mask`, `position_ids`.
        targets: int [B, T], the label of each token's successor.
        num_items_in_batch, label_smoothing: see `losses.token_cross_entropy`.
        named: what its layers got by name.

    Raises:
        ValueError: the labels are not one for each token.
    """
    if targets.shape != hidden_states.shape[:2]:
        fix = "leave logits_to_keep out in training"
        raise ValueError(f"num_nextn_predict_layers needs one label per token; labels are {[*targets.shape]}: {fix}.")
    vectors = model.model._embed_tokens(inputs["input_ids"], inputs["inputs_embeds"], None, None)
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    is_plain = isinstance(mask, torch.Tensor) and mask.dim() == 2
    if is_plain:
        mask = mask[:, -targets.shape[1] :]  # without virtual tokens, which only the model's own layers have in a cache
    if positions is None and (starts := named.get("cu_seq_lens_q")) is not None:
        positions = flattened_positions(starts, targets.shape)
    own = further = None if positions is None else starts_of(positions).cumsum(-1)
    items = count_of(targets, num_items_in_batch, hidden_states.device)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False, "final_norm": _shared_norm(model)}
    total = hidden_states.new_zeros((), dtype=torch.float32)
    for layer in model.mtp:
        vectors, targets = _moved(vectors), _moved(targets, IGNORED)
        asked = targets.masked_fill(mask == 0, IGNORED) if is_plain else targets  # nothing is asked of padding
        if own is not None:  # nor of the last tokens of a sequence about the next one in their row
            further = _moved(further)
            asked = asked.masked_fill(own != further, IGNORED)
        hidden_states = layer(hidden_states, vectors, **given, **named)
        total = total + model.logits_and_loss(hidden_states, asked, items, False, label_smoothing)[1]
    return total / len(model.mtp)


class MultiTokenDrafts(CandidateGenerator):
    """Drafts n tokens a step by a model's own layers that predict further, for the library's assisted decoding.

    A layer has its own cache. After the model has read the drafts, the states of the tokens that it accepted
    replace the drafts' own.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": -1}  # the last ones only

    def __init__(self, model, generation_config, logits_processor):
        self.model, self.processors = model, logits_processor
        self.samples, self.longest = generation_config.do_sample, generation_config.max_length
        self.caches = [layer.decoder.new_cache() for layer in model.mtp]
        for cache in self.caches:
            cache.activate_past_recording()
        self.first = self.start = 0  # of the text's places: the first that the layers read, and that of `states`
        self.states = None  # [1, places, C]

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        """The text [1, L] with drafts after it, and their scores [1, n, V]; none before the model has read the text."""
        length, count = input_ids.shape[1], len(self.caches)
        count = min(count, self.longest - length - 1)
        if is_first_iteration or count <= 0:
            return input_ids, None
        states = model_outputs.hidden_states[-1]
        if self.states is None:
            self.first = self.start = length - 1 - states.shape[1]  # not 0 if a cache with earlier tokens was given
        else:
            accepted = length - 1 - self.start - self.states.shape[1]
            states = torch.cat((self.states, states[:, :accepted]), dim=1)
        self.states = states
        mask = model_kwargs.get("attention_mask")
        mask = mask[:, self.first : length - 1] if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        scores: list[torch.Tensor] = []
        text = input_ids
        for depth in range(count):
            vectors = self.model.model._embed_tokens(text[:, self.start + depth + 1 :], None, None, None)
            given = {"attention_mask": mask, "past_key_values": self.caches[depth], "use_cache": True}
            states = self.model.mtp[depth](states, vectors, _shared_norm(self.model), **given)
            logits = self.processors(text, self.model.logits_of(states[:, -1]).float())
            token = logits.softmax(-1).multinomial(1) if self.samples else logits.argmax(-1, keepdim=True)
            text, scores = torch.cat((text, token.to(text.device)), dim=1), [*scores, logits]
        # Layer k has read k - 1 drafts. What the last layer has read of the text stays; the others keep as much.
        keep = max(length - len(self.caches), self.first)
        for cache in self.caches[:count]:
            cache.crop(keep - (length - 1))
        self.states, self.start = self.states[:, keep - self.start :], keep
        return text, torch.stack(scores, dim=1)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing: there are always as many drafts as layers."""
