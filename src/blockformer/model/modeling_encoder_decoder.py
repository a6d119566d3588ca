"""The encoder-decoder and what each task makes of it, registered for `trust_remote_code`.

Every module that an exported repo needs is imported here by name: some versions of the loader copy no others.

B batch, S source length, T target length, C hidden size, V vocabulary.
"""

from dataclasses import fields

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from .attention import Attention  # noqa: F401
from .axes import axis  # noqa: F401
from .compat import CACHE, takes_cache
from .configuration_blockformer import BlockformerConfig  # noqa: F401
from .configuration_encoder_decoder import BlockformerEncoderDecoderConfig
from .feed_forward import FeedForward  # noqa: F401
from .input_checks import check_early_exit
from .language_model_head import LanguageModelHead
from .layer import Layer  # noqa: F401
from .losses import IGNORED, refuse_smoothing, sequence_loss, span_loss
from .merged_attention import CenteredStack, MergedStack
from .normalization import RMSNorm  # noqa: F401
from .positions import rotations_of  # noqa: F401
from .pretrained_model import BlockformerPreTrainedModel
from .relative_bias import RelativeBias  # noqa: F401
from .relative_keys import RelativeKeys  # noqa: F401
from .release import VERSION  # noqa: F401
from .rotary import RotaryPositions  # noqa: F401
from .runtime import loop_by_runtime
from .scaled_embedding import ScaledEmbedding  # noqa: F401
from .sinusoidal import SinusoidalPositions  # noqa: F401
from .stack import Stack, last_of, last_tokens, states_at
from .unscaled_token import PartlyScaledEmbedding
from .vector_positions import LearnedPositions  # noqa: F401


class TwoStacks(BlockformerPreTrainedModel):
    """What a model of two stacks has, with a head or without."""

    config_class = BlockformerEncoderDecoderConfig

    @property
    def dummy_inputs(self):
        """What exporters try a model with: a target, too."""
        return super().dummy_inputs | {"decoder_input_ids": super().dummy_inputs["input_ids"]}

    def get_encoder(self, modality=None):
        """The encoder's stack; for images or sound the model itself, by which transformers says that it has none."""
        return getattr(self, "model", self).encoder if modality is None else self

    def get_decoder(self):
        """The decoder's stack."""
        return getattr(self, "model", self).decoder

    def shift_right(self, labels):
        """The decoder's input for teacher forcing: a start token, then each label but the last. int [B, T] -> [B, T].

        The start token is `decoder_start_token_id` or, with `decoder_starts_with_last_label`, each row's last label.

        Raises:
            ValueError: the config has no start token or, with labels of -100, no `pad_token_id`.
        """
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
            given = f"{labels.dtype} {list(labels.shape)}" if torch.is_tensor(labels) else type(labels).__name__
            raise ValueError(f"labels must be a tensor of integers [batch, length], not {given}.")
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        starts_with_last = self.config.decoder_starts_with_last_label
        if pad is None or (start is None and not starts_with_last):
            raise ValueError("set decoder_start_token_id and pad_token_id in the config: labels are shifted with them.")
        shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=pad if starts_with_last else start)
        if starts_with_last:
            real = (labels != IGNORED) & (labels != pad)
            last = (torch.arange(labels.shape[1], device=labels.device) * real).argmax(-1, keepdim=True)
            shifted[:, :1] = labels.gather(1, last)
        return shifted.masked_fill(shifted == IGNORED, pad)

    def target_or_source(self, decoder_input_ids, decoder_inputs_embeds, input_ids):
        """The target's tokens or, without any target, the source's, shifted right: int [B, T], or None."""
        if decoder_input_ids is not None or decoder_inputs_embeds is not None or input_ids is None:
            return decoder_input_ids
        return self.shift_right(input_ids)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """On both sides, or only the source's where the target has its own vocabulary; returns the encoder's."""
        if self.config.decoder_vocab_size is not None:
            return self.get_encoder().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if not self.config.share_embeddings:
            self.get_decoder().resize_token_embeddings(embeddings.num_embeddings, mean_resizing=mean_resizing)
        self.tie_weights()
        return embeddings

    def resize_decoder_token_embeddings(self, new_num_tokens, mean_resizing=True):
        """Change the size of the target's own vocabulary: the head and the decoder's embeddings, which it gives."""
        if self.config.decoder_vocab_size is None:
            raise ValueError("decoder_vocab_size is None: both sides share a vocabulary; use resize_token_embeddings.")
        source_size = self.config.vocab_size
        embeddings = self.get_decoder().resize_token_embeddings(new_num_tokens, mean_resizing=mean_resizing)
        self.config.vocab_size, self.config.decoder_vocab_size = source_size, embeddings.num_embeddings
        head = self.get_output_embeddings()
        if head is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, new_num_tokens, mean_resizing=mean_resizing))
        self.tie_weights()
        return embeddings


class BlockformerEncoderDecoderModel(TwoStacks):
    """Two stacks without a head: source tokens [B, S] and target tokens [B, T] to states [B, T, C]."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.encoder = (CenteredStack if config.centered_window else Stack)(config, is_causal=False)
        decoder = MergedStack if config.merged_attention else Stack
        self.decoder = decoder(config, is_causal=True, has_cross_attention=True)
        if config.unscaled_token_id is not None:
            self._tied_weights_keys = self._tied_weights_keys | PartlyScaledEmbedding.tied
            for stack in (self.encoder, self.decoder):
                stack.embed_tokens = PartlyScaledEmbedding.of(stack.embed_tokens, config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """The decoder's embeddings are the encoder's where `share_embeddings` says so."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys) if self.config.share_embeddings else {}

    def get_input_embeddings(self):
        """The encoder's embeddings, which the decoder shares if `share_embeddings` is set."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value):
        """Replace them, in the decoder too where both share one matrix."""
        self.encoder.embed_tokens = value
        if self.config.share_embeddings:
            self.decoder.embed_tokens = value

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict | None = None,
        encoder_outputs=None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        decoder_head_mask: torch.Tensor | None = None,
        cross_attn_head_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """Run the encoder, unless its outputs are given, and the decoder.

        Args:
            input_ids: source tokens, int [B, S]; or else `inputs_embeds` [B, S, C], or `encoder_outputs`.
            attention_mask: [B, S] of 0 and 1 over the source.
            decoder_input_ids: target tokens, int [B, T], already shifted; or else `decoder_inputs_embeds` [B, T, C].
                Without either the decoder reads `input_ids`, shifted right, where `decoder_reads_source` (BART).
            decoder_attention_mask: [B, T] of 0 and 1 over the target.
            encoder_outputs: the encoder's outputs of an earlier call.
            past_key_values: an `EncoderDecoderCache`; None makes one if `use_cache`.
            head_mask: [layers, H] for the encoder; `decoder_head_mask` for the decoder's self-attention,
                `cross_attn_head_mask` for its look at the encoder.
            use_cache: see `Stack.forward`.
        """
        if self.config.decoder_reads_source:
            decoder_input_ids = self.target_or_source(decoder_input_ids, decoder_inputs_embeds, input_ids)
        _check_target(decoder_input_ids, decoder_inputs_embeds, kwargs)
        if encoder_outputs is None:
            source = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encoder(**source, head_mask=head_mask, return_dict=True, **kwargs)
        elif not isinstance(encoder_outputs, dict):
            names = ("last_hidden_state", "hidden_states", "attentions")
            encoder_outputs = BaseModelOutput(**dict(zip(names, encoder_outputs, strict=False)))
        target: dict = {"input_ids": decoder_input_ids, "inputs_embeds": decoder_inputs_embeds, "use_cache": use_cache}
        target |= {"attention_mask": decoder_attention_mask, "position_ids": decoder_position_ids}
        target |= {"past_key_values": past_key_values, "head_mask": decoder_head_mask, "return_dict": True}
        target["cross_attn_head_mask"] = cross_attn_head_mask
        states = encoder_outputs["last_hidden_state"]
        outputs = self.decoder(**target, encoder_hidden_states=states, encoder_attention_mask=attention_mask, **kwargs)
        return Seq2SeqModelOutput(
            **{name: outputs.get(name) for name in ("last_hidden_state", CACHE, "cross_attentions")},
            **{f"decoder_{name}": outputs.get(name) for name in ("hidden_states", "attentions")},
            **{f"encoder_{name}": encoder_outputs.get(name) for name in ("hidden_states", "attentions")},
            encoder_last_hidden_state=states,
        )


def _check_target(decoder_input_ids, decoder_inputs_embeds, kwargs) -> None:
    """Refuse an encoder-decoder's call that gives the decoder nothing to read, or rows that hold several sequences."""
    for name in ("position_ids", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            fix = "give padded rows (DataCollatorForSeq2Seq), and decoder_position_ids for the target"
            raise ValueError(f"{name} is not supported by an encoder-decoder, whose rows hold one sequence: {fix}.")
    if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
        instead = "or labels instead (decoder_reads_source=True in the config has the decoder read input_ids too)"
        raise ValueError(f"pass exactly one of decoder_input_ids and decoder_inputs_embeds, {instead}.")


class BlockformerEncoderDecoderPreTrainedModel(TwoStacks):
    """An encoder-decoder with a head: `self.model` and what a task puts on it."""

    def __init__(self, config):
        super().__init__(config)
        self.model = BlockformerEncoderDecoderModel(config)

    def prepare_decoder_input_ids_from_labels(self, labels):
        """As `shift_right`, by the name that `DataCollatorForSeq2Seq` knows."""
        return self.shift_right(labels)


def _encoder_decoder_parts(outputs) -> dict:
    """What every head's output passes on: all but the decoder's last state."""
    return {field.name: outputs.get(field.name) for field in fields(outputs) if field.name != "last_hidden_state"}


def _last_ends(config, input_ids, attention_mask, shape):
    """The place of each row's last end token, int [B], where the official classes find it.

    They refuse rows that have none, or not all equally many. Such a row ends with the last end token that is not
    padding or, without any, with its last real token.
    """
    has_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
    if config.eos_token_id is None or input_ids is None:
        return last_of(attention_mask != 0) if has_mask else last_tokens(config, input_ids, attention_mask, shape)
    real = (
        attention_mask != 0 if has_mask else input_ids != (-1 if config.pad_token_id is None else config.pad_token_id)
    )
    tokens = config.eos_token_id if isinstance(config.eos_token_id, list | tuple) else [config.eos_token_id]
    ends = torch.stack([input_ids == token for token in tokens]).any(0)
    own = torch.where((ends & real).any(-1, keepdim=True), ends & real, real)
    counts = ends.sum(-1)
    return last_of(torch.where((counts == counts[0]).all() & (counts[0] > 0), ends, own))


class BlockformerEncoderDecoderForConditionalGeneration(
    LanguageModelHead, BlockformerEncoderDecoderPreTrainedModel, GenerationMixin
):
    """An encoder-decoder that writes: `logits` [B, T, V] of the next target token."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _sample = loop_by_runtime("_sample")
    _beam_search = loop_by_runtime("_beam_search")

    def __init__(self, config):
        super().__init__(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """The head is the decoder's embedding matrix where `tie_word_embeddings` says so."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        source = "encoder" if self.config.share_embeddings else "decoder"
        tied = {"lm_head.weight": f"model.{source}.embed_tokens.weight"}
        return tied if self.config.tie_word_embeddings else {}

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict | None = None,
        encoder_outputs=None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Run the model and its head; the other arguments are as in `BlockformerEncoderDecoderModel.forward`.

        Args:
            labels: int [B, T]; the loss ignores -100. Without decoder inputs they are shifted to make them.
            logits_to_keep: compute logits only for this many last positions (0: all), or for the positions in a tensor.
            num_items_in_batch: the count of labels over an optimizer step, as `Trainer` gives it.
            return_logits: with labels, whether to give logits too; see `LanguageModelHead.logits_and_loss`.
            label_smoothing: share of the probability that is spread over the vocabulary.

        Returns:
            `logits` [B, T, V] and, with labels, `loss`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.shift_right(labels)
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        rest = (past_key_values, inputs_embeds, decoder_inputs_embeds, use_cache, decoder_position_ids)
        outputs = self.model(*inputs, *rest, return_dict=True, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        given = (labels, num_items_in_batch, return_logits, label_smoothing, {"labels": labels})
        logits, loss = self.logits_and_loss(outputs.last_hidden_state[:, keep], *given)
        return self.runtime.output(Seq2SeqLMOutput, loss=loss, logits=logits, **_encoder_decoder_parts(outputs))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        check_early_exit(generation_config, 0)
        generation_config.prefill_chunk_size = None  # for prompts of decoders: here it cuts the mask of the source
        is_fresh = model_kwargs.get(CACHE) is None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if not isinstance(cache, EncoderDecoderCache):
            return
        # One made from the config, by the library or by the caller, has the windows of the target's layers.
        if is_fresh or (any(cache.cross_attention_cache.is_sliding) and not any(cache.is_updated.values())):
            cache.cross_attention_cache = DynamicCache()
        if is_fresh:
            model_kwargs[CACHE] = self.runtime.cache(cache)


class BlockformerEncoderDecoderForSequenceClassification(BlockformerEncoderDecoderPreTrainedModel):
    """One row, one answer: the decoder reads the row again; its state at the last end token is classified (BART, T5).

    Pad on the right: the decoder reads the padding of a row too, and only what comes after a token does not change it.
    """

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.head_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict | None = None,
        encoder_outputs=None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> Seq2SeqSequenceClassifierOutput:
        """Tokens [B, S] to `logits` [B, num_labels]; with labels (see `losses.sequence_loss`) also `loss`.

        `label_smoothing` is as in `losses.token_cross_entropy`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        decoder_input_ids = self.target_or_source(decoder_input_ids, decoder_inputs_embeds, input_ids)
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        outputs = self.model(*inputs, None, inputs_embeds, decoder_inputs_embeds, use_cache, return_dict=True, **kwargs)
        states = outputs.last_hidden_state
        states = states_at(states, _last_ends(self.config, input_ids, attention_mask, states.shape[:2]))
        logits = self.score(self.dropout(torch.tanh(self.dense(self.dropout(states)))))
        loss = None
        if labels is not None and (own_loss := self.own_loss()) is not None:
            loss = own_loss(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        elif labels is not None:
            loss = sequence_loss(logits, labels, self.config, num_items_in_batch, label_smoothing)
        return Seq2SeqSequenceClassifierOutput(loss=loss, logits=logits, **_encoder_decoder_parts(outputs))


class BlockformerEncoderDecoderForQuestionAnswering(BlockformerEncoderDecoderPreTrainedModel):
    """Extractive question answering on the decoder's states over the text: `start_logits`, `end_logits` [B, T]."""

    def __init__(self, config):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict | None = None,
        encoder_outputs=None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        """Tokens [B, S] to `start_logits` and `end_logits` [B, S]; with both positions int [B] also `loss`."""
        kwargs.pop("num_items_in_batch", None)
        refuse_smoothing(kwargs.pop("label_smoothing", 0.0), "a span's are two positions")
        decoder_input_ids = self.target_or_source(decoder_input_ids, decoder_inputs_embeds, input_ids)
        inputs = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        outputs = self.model(*inputs, None, inputs_embeds, decoder_inputs_embeds, use_cache, return_dict=True, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (self.own_loss() or span_loss)(start_logits, end_logits, start_positions, end_positions)
        return Seq2SeqQuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **_encoder_decoder_parts(outputs)
        )


for _auto_class, _target in BlockformerEncoderDecoderConfig.auto_classes.items():
    globals()[_target.rpartition(".")[2]].register_for_auto_class(_auto_class)
