"""The stack: embeddings, layers, final norm. A decoder is one stack, an encoder-decoder is two.

B batch, T query length, S key length, C hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import logging

from .attention import layer_type_of, with_bias
from .axes import BLOCKS
from .compat import CACHE, capture_outputs, causal_masks, create_bidirectional_mask, encoder_masks, takes_cache
from .input_checks import cached_length, check_inputs, check_positions, check_source
from .layer import Earlier, LayerInputs, StackInputs, layer_class
from .normalization import make_norm
from .positions import LEARNED, counted_positions, flattened_positions, rotations_of, starts_of, texts_of
from .pretrained_model import BlockformerPreTrainedModel
from .scaled_embedding import ScaledEmbedding
from .vector_positions import padding_before

logger = logging.get_logger(__name__)


class Stack(BlockformerPreTrainedModel):
    """Token and position embeddings, layers, final norm.

    Args:
        is_causal: whether a token sees only itself and earlier tokens.
        has_cross_attention: whether each layer also looks at an encoder's states.
    """

    def __init__(self, config, is_causal: bool, has_cross_attention: bool = False):
        super().__init__(config)
        self.is_causal, self.has_cross_attention = is_causal, has_cross_attention
        self.side = "decoder_" if is_causal and config.is_encoder_decoder else ""  # of its arguments in error messages
        scales_inside = config.embedding_scale is not None and config.scales_in_embedding
        self.embedding_scale = None if scales_inside else config.embedding_scale
        self.dropout = nn.Dropout(config.hidden_dropout) if config.hidden_dropout else None
        # In most official classes, padding teaches the embeddings nothing, even where a head reads its states.
        usual, learns = config.is_decoder or config.is_encoder_decoder, config.pad_token_learns
        padding_idx = None if (usual if learns is None else learns) else config.pad_token_id
        num_layers, vocab_size = config.stack_sizes(is_decoder=is_causal)
        width = config.embedding_size
        table = (vocab_size, config.token_size, padding_idx)
        self.embed_tokens = ScaledEmbedding(*table, config) if scales_inside else nn.Embedding(*table)
        if config.embedding_scale is not None:
            self.embed_tokens.initializer_factor = 1 / config.embedding_scale
        narrow = None if config.token_embedding_size == config.hidden_size else config.token_embedding_size
        self.token_projection = nn.Linear(narrow, config.hidden_size, bias=False) if narrow else None
        types, task_types = config.type_vocab_size, config.task_type_vocab_size
        self.embed_token_types = nn.Embedding(types, width) if types else None
        self.embed_task_types = nn.Embedding(task_types, width) if task_types else None
        vectors, rotations, biases, distances = map(config.scheme, ("vectors", "rotations", "biases", "distances"))
        self.embed_positions = vectors(config) if vectors else None
        self.embedding_norm = make_norm(config, width) if config.embedding_norm else None
        self.embed_projection = None if width == config.hidden_size else nn.Linear(width, config.hidden_size)
        self.rotary_emb = rotations(config) if rotations else None
        # Positions from which on a text turns by other frequencies, from its beginning.
        self.switches = [at for part in self.modules() if (at := getattr(part, "switches_at", None)) is not None]
        shared = None if config.relative_bias_per_layer else biases or distances
        self.relative_bias: Any = shared(config, bidirectional=not is_causal) if shared else None
        self.has_distances = distances is not None
        self.has_shared_bias = shared is not None and not self.has_distances
        groups = config.num_hidden_groups or num_layers
        self.passes = num_layers // groups  # more than one where layers share weights
        self.token_inputs: Any = config.parts["token_inputs"][0](config) if config.hidden_size_per_layer_input else None
        layer = getattr(self, "layer_class", None) or layer_class(config)
        self.layers = nn.ModuleList(layer(config, index, is_causal, has_cross_attention) for index in range(groups))
        self.norm = make_norm(config, config.hidden_size) if config.final_norm else None
        output = config.final_projection_size or narrow
        self.final_projection = nn.Linear(config.hidden_size, output, bias=False) if output else None
        self.gradient_checkpointing = False

    @takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cross_attn_head_mask: torch.Tensor | None = None,
        task_type_ids: torch.Tensor | None = None,
        reads_padding: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack.

        Args:
            input_ids: tokens, int [B, T]; or else `inputs_embeds` [B, T, E], E the config's `token_size`.
            attention_mask: [B, S] over cached and new tokens, 0 for padding; or a 4D mask; or masks by layer type.
            position_ids: [B, T]; None counts the tokens of `attention_mask`, so that padding shifts nothing: see
                `padding_position` for its own.
            past_key_values: a cache of the library's; None makes a dynamic one if `use_cache`.
            token_type_ids: int [B, T], each token's segment; None is segment 0 for all. `task_type_ids` likewise.
            encoder_hidden_states: [B, S, C] for cross-attention, `encoder_attention_mask` [B, S] of 0 and 1 over them.
            head_mask: [len(self.layers), H], multiplies each head's output; in cross-attention `cross_attn_head_mask`,
                without which a decoder takes `head_mask` there too.
            use_cache: whether to return keys and values; None is the config's in evaluation, no in training.
            reads_padding: whether the states of padding are read too; otherwise they may be zeros.

        Returns:
            `last_hidden_state` [B, T, the config's `output_size`], the cache, and what was requested by
            `output_hidden_states` (each layer's input and the final state) and `output_attentions` (eager backend).
        """
        tokens, starts = input_ids if inputs_embeds is None else inputs_embeds, kwargs.get("cu_seq_lens_q")
        types = {"token_type_ids": token_type_ids, "task_type_ids": task_type_ids}
        checked = (input_ids, inputs_embeds, attention_mask, past_key_values, types)
        hides_nothing = check_inputs(self.config, self.config.stack_sizes(self.is_causal)[1], *checked, self.side)
        check_source(self, encoder_hidden_states, encoder_attention_mask, tokens.shape[0], starts)
        if head_mask is not None and len(head_mask) != len(self.layers):
            raise ValueError(f"head_mask must have {len(self.layers)} rows, one for each layer, not {len(head_mask)}.")
        if position_ids is None and starts is not None:
            position_ids = flattened_positions(starts, tokens.shape[:2])
        if position_ids is not None:  # counted ones do not reach the attention backend: see `StackInputs`
            check_positions(self.config, position_ids, tokens.shape[:2], None)
        if "cache" in kwargs and any(map(self.config.scheme, ("biases", "key_terms"))):
            raise ValueError("generate_batch does not say where keys are, which relative positions need: use generate.")
        use_cache = self._uses_cache(use_cache, past_key_values)
        kwargs = kwargs if getattr(self.config, "is_causal", True) else {"is_causal": False} | kwargs  # set by hand

        hidden_states = self._embed_tokens(input_ids, inputs_embeds, *types.values(), attention_mask, position_ids)
        attention_mask = None if hides_nothing else attention_mask
        past = cached_length(past_key_values)
        places = torch.arange(tokens.shape[1], device=hidden_states.device) + past
        own = self._counted_positions(places, attention_mask, past, input_ids) if position_ids is None else position_ids
        hidden_states = self._embed(hidden_states, own)

        texts = None if position_ids is None else position_ids.expand(tokens.shape[:2])
        named = kwargs | {"position_ids": texts}
        # Without a cache, the library takes any gap for the start of a text; a mask without padding says: one a row.
        if texts is not None and past_key_values is None and starts is None and (use_cache or not self.is_causal):
            texts = texts_of(texts)
        positions = (own, None if hides_nothing else texts, places)
        source = (encoder_hidden_states, encoder_attention_mask)
        cross_mask = head_mask if cross_attn_head_mask is None and self.config.is_decoder else cross_attn_head_mask
        given = (hidden_states, input_ids, attention_mask, *positions, past_key_values, source, (head_mask, cross_mask))
        layer_inputs = self.runtime.plan(self, StackInputs(*given, use_cache, reads_padding, named))

        if use_cache and past_key_values is None:
            past_key_values = self.new_cache(for_cross_attention=encoder_hidden_states is not None)
        elif use_cache and encoder_hidden_states is not None and not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())  # it keeps their keys and values
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()  # each would write twice
        named = named | {"past_key_values": None if recomputes else past_key_values, "use_cache": use_cache}
        states = self.runtime.layers(self, hidden_states, encoder_hidden_states, layer_inputs, named)

        cache = {CACHE: past_key_values if use_cache else None}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.after_layers(states), **cache)

    def plan(self, inputs: StackInputs, masks: dict | None = None) -> LayerInputs:
        """What all layers read. The bias that they share goes into the masks, which are the library's or given here."""
        states, length, past_key_values = inputs.hidden_states, inputs.places.shape[0], inputs.past_key_values
        masks = self.plain_masks(inputs) if masks is None else masks
        if masks and self.has_shared_bias:
            if past_key_values is not None:
                length, _ = past_key_values.get_mask_sizes(length, 0)
            is_causal = self.is_causal and inputs.named.get("is_causal", True)
            bias, places = self.shared_bias(states, inputs.places, length), inputs.places if is_causal else None
            masks = {kind: with_bias(self.config, mask, bias, places) for kind, mask in masks.items()}
        rotations = rotations_of(self.rotary_emb, self.config, states, inputs.position_ids)
        encoder_mask, (source, mask) = None, inputs.source
        if source is not None:
            given = {"inputs_embeds": states, "attention_mask": mask, "encoder_hidden_states": source}
            encoder_mask = create_bidirectional_mask(config=self.config, **given)
        others = (encoder_mask, *inputs.head_masks, Earlier(inputs.input_ids))
        distances = self.relative_bias() if self.has_distances else None
        vectors = None if self.token_inputs is None else self.token_inputs(inputs.input_ids, states)
        return LayerInputs(masks, rotations, inputs.places, *others, distances, vectors)

    def shared_bias(self, states, places, key_length: int):
        """The bias [1, H, T, S] that all layers share, in the dtype of the queries made of states [B, T, C]."""
        device = states.device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else states.dtype
        return self.relative_bias(places, key_length).to(states.device, dtype)

    def run_layers(self, hidden_states, encoder_hidden_states, layer_inputs, named: dict):
        """Run the layers in turn. Only the states go by position, so a hook before a layer may return nothing else."""
        plan, rest = layer_inputs, layer_inputs._replace(masks={}, rotations={}, distances=None, token_inputs=None)
        count = self.config.num_hidden_layers // self.passes if self.config.is_decoder else None  # fewer while drafting
        for index, layer in enumerate(list(self.layers)[:count]):  # any may be in a wrapper of the caller's
            kind = getattr(layer, "layer_type", None) or layer_type_of(self.config, index, self.is_causal)
            own = None if plan.token_inputs is None else plan.token_inputs[:, :, getattr(layer, "layer_idx", index)]
            given = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": plan.masks[kind]}
            given |= {"distances": plan.distances, "token_input": own, "position_embeddings": plan.rotations.get(kind)}
            # In reentrant checkpointing, what is given by name gets no gradient.
            learns = self.gradient_checkpointing and any(getattr(x, "requires_grad", False) for x in given.values())
            args, given = (given.values(), {}) if learns else ((), given)
            for _ in range(self.passes):
                hidden_states = layer(hidden_states, *args, layer_inputs=rest, **given, **named)
        return hidden_states

    def after_layers(self, hidden_states):
        """The final norm, dropout and projection: [..., C] -> [..., C or narrower]."""
        states = hidden_states if self.norm is None else self.norm(hidden_states)
        states = self.dropout(states) if self.dropout is not None and self.config.final_dropout else states
        return states if self.final_projection is None else self.final_projection(states)

    def new_cache(self, for_cross_attention: bool = False):
        """An empty cache; with `for_cross_attention` one that holds the encoder's keys and values too."""
        cache = DynamicCache(config=self.config)
        return EncoderDecoderCache(cache, DynamicCache()) if for_cross_attention else cache

    def _counted_positions(self, places, attention_mask, past, input_ids):
        """Positions [1 or B, T] where none are given: padding has what `padding_position` says."""
        is_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        is_token = attention_mask != 0 if is_mask else None
        longest = past + places.shape[0] if isinstance(past, int) and not torch.compiler.is_compiling() else None
        fits = longest is not None and longest <= self.config.max_position_embeddings
        own = places if fits or not is_mask else places.clamp(max=self.config.max_position_embeddings - 1)
        if self.config.padding_position != "index":
            is_token, own = padding_before(self.config, places, is_token, input_ids)
        columns, first = (places, 0) if is_mask else (slice(None), past)  # a mask may cover a static cache's empty room
        positions = places[None] if is_token is None else counted_positions(is_token, columns, own, first)
        if not fits:
            check_positions(self.config, positions, positions.shape, None if is_mask or len(positions) > 1 else longest)
        return positions

    def _uses_cache(self, use_cache, past_key_values) -> bool:
        if not self.is_causal and past_key_values is not None and self.config.is_decoder:
            raise ValueError("past_key_values needs causal layers; here, tokens see later ones: pass the whole text.")
        if not self.is_causal:
            return False
        if use_cache and self.gradient_checkpointing and self.training:
            logger.warning_once("use_cache=True is ignored with gradient checkpointing: no cache is made.")
            return False
        return self.config.use_cache and not self.training if use_cache is None else use_cache

    def _embed_tokens(self, input_ids, inputs_embeds, token_type_ids, task_type_ids, *where):
        """Tokens or their embeddings, scaled and projected, and their types: [B, T] or [B, T, E] -> [B, T, C]."""
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is not None and self.config.token_types_as_tokens:
            states = states + self.embed_tokens(token_type_ids)
        if self.embedding_scale is not None:
            states = states * self.embedding_scale
        states = states if self.token_projection is None else self.token_projection(states)
        for table, types in ((self.embed_token_types, token_type_ids), (self.embed_task_types, task_type_ids)):
            if table is not None:
                none = torch.zeros(1, 1, dtype=torch.long, device=states.device)
                states = states + table(none if types is None else types)
        return states

    def _embed(self, hidden_states, position_ids):
        if self.embed_positions is not None:
            vectors, kind = self.embed_positions(position_ids), self.config.position_type
            hidden_states = hidden_states + (vectors if kind in LEARNED else vectors.to(self.dtype))
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states)
        hidden_states = hidden_states if self.dropout is None else self.dropout(hidden_states)
        return hidden_states if self.embed_projection is None else self.embed_projection(hidden_states)

    def plain_masks(self, inputs: StackInputs) -> dict:
        """The library's mask for each layer type."""
        mask, positions = inputs.attention_mask, inputs.given_positions
        if isinstance(mask, dict):
            return mask
        kinds = BLOCKS["layer_types"].keys() & self.config.layer_types
        others = {kind: BLOCKS["layer_types"][kind].mask_of(inputs, self.config) for kind in kinds}
        if self.is_causal and inputs.named.get("is_causal", True):  # the library's argument, for the backend too
            return others | causal_masks(self.config, inputs.hidden_states, mask, inputs.past_key_values, positions)
        sequences = None if mask is not None or positions is None else starts_of(positions).cumsum(-1)
        return others | encoder_masks(self.config, inputs.hidden_states, mask, sequences)


def last_tokens(config, input_ids, attention_mask, shape):
    """The place of each row's last token, int [B], where the official classes of decoders find it.

    It is the last token that is not `config.pad_token_id`, whatever the mask says: the one before the end token, where
    that also pads. Of embeddings, and of one row where no padding token is set, it is the last place. Several rows
    without a padding token, which the official classes refuse, end where the mask says.

    Args:
        input_ids: int [B, T], or None for embeddings.
        attention_mask: [B, S] of 0 and 1, the last T are the tokens', or anything else that says nothing of them.
        shape: [B, T].
    """
    batch, length = shape
    if input_ids is not None and config.pad_token_id is not None:
        return last_of(input_ids != config.pad_token_id)
    if batch == 1 or config.pad_token_id is not None:
        return torch.full((batch,), length - 1)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        raise ValueError("cannot find the last token of each of several rows: pass attention_mask or set pad_token_id.")
    return last_of(attention_mask[:, -length:] != 0)


def last_of(chosen):
    """The last place of each row that is chosen, bool [B, T] -> int [B]; 0 in a row that has none."""
    return (torch.arange(chosen.shape[1], device=chosen.device) * chosen).argmax(-1)


def states_at(states, places):
    """One state of each row: [B, T, C] and int [B] -> [B, C]."""
    return states[torch.arange(places.shape[0], device=states.device), places.to(states.device)]
