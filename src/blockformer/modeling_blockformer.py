"""The models and their task heads, registered for `trust_remote_code`.

Every module that an exported repo needs is imported here by name: some versions of the loader copy no others.
"""

import torch
from torch import nn
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .attention import Attention  # noqa: F401
from .base import BlockformerPreTrainedModel
from .cache import GrowingGenerationMixin
from .compat import causal_masks  # noqa: F401
from .configuration_blockformer import BlockformerDecoderConfig
from .feed_forward import FeedForward  # noqa: F401
from .inputs import check_generation
from .layer import Layer  # noqa: F401
from .losses import next_token_cross_entropy, sequence_loss, span_loss, token_cross_entropy
from .normalization import RMSNorm  # noqa: F401
from .packing import Packing  # noqa: F401
from .positions import RotaryPositions  # noqa: F401
from .stack import Stack


class BlockformerDecoderModel(Stack):
    """A decoder without a head: tokens [B, T] to states [B, T, C]. See `Stack.forward`."""

    config_class = BlockformerDecoderConfig

    def __init__(self, config):
        super().__init__(config, is_causal=True, has_cross_attention=config.add_cross_attention)
        self.post_init()


class BlockformerDecoderPreTrainedModel(BlockformerPreTrainedModel):
    """A decoder with a head: `self.model` and what a task puts on it."""

    config_class = BlockformerDecoderConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = BlockformerDecoderModel(config)


class BlockformerDecoderForCausalLM(BlockformerDecoderPreTrainedModel, GrowingGenerationMixin):
    """A decoder with a language model head: logits of the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions:
        """Run the decoder and its head; the arguments not listed are those of `Stack.forward`.

        Args:
            labels: int [B, T], the inputs themselves (the shift is done here), -100 where there is no loss.
            logits_to_keep: compute logits for the last so many positions only (0: all), or for those of a tensor.
            num_items_in_batch: the count of labels over an optimizer step, as `Trainer` gives it.

        Returns:
            `logits` [B, T, V] and, with labels, `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, keep]
        if self.config.logit_scale is not None:
            hidden_states = hidden_states * self.config.logit_scale
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = next_token_cross_entropy(logits, labels, num_items_in_batch, shift_labels)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.get("cross_attentions"),
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
        check_generation(self.config, generation_config, mask, cache, max_cache_length)
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, mode, batch_size, max_cache_length
        )


class BlockformerDecoderForSequenceClassification(BlockformerDecoderPreTrainedModel):
    """One row, one answer: a linear head on the last real token, after which the decoder has seen the whole row."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, num_items_in_batch=None, **kwargs
    ) -> SequenceClassifierOutputWithPast:
        """Tokens [B, T] to `logits` [B, num_labels]; with labels (see `losses.sequence_loss`) also `loss`.

        The last real token is told by `attention_mask` or, without one, by `config.pad_token_id`.

        Raises:
            ValueError: several rows and neither to tell where they end.
        """
        outputs = self.model(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = outputs.last_hidden_state
        last = self._last_token(states, input_ids, attention_mask)
        logits = self.score(states[torch.arange(states.shape[0], device=states.device), last])
        loss = None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _last_token(self, states, input_ids, attention_mask):
        """Index [B] of each row's last real token, whichever side is padded."""
        length = states.shape[1]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            real = attention_mask[:, -length:].to(states.device) != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids.to(states.device) != self.config.pad_token_id
        elif states.shape[0] == 1:
            return torch.full((1,), length - 1, device=states.device)
        else:
            raise ValueError(
                "several rows, and nothing tells where each ends: give attention_mask or set pad_token_id."
            )
        return (torch.arange(length, device=states.device) * real).argmax(-1)


class BlockformerDecoderForTokenClassification(BlockformerDecoderPreTrainedModel):
    """One answer a token: dropout and a linear head."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        dropout = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs
    ) -> TokenClassifierOutput:
        """Tokens [B, T] to `logits` [B, T, num_labels]; with labels int [B, T] (-100: none) also `loss`."""
        outputs = self.model(input_ids, attention_mask, **kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else token_cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BlockformerDecoderForQuestionAnswering(BlockformerDecoderPreTrainedModel):
    """Extractive question answering: the first and the last token of the answer's span."""

    def __init__(self, config):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, start_positions=None, end_positions=None, **kwargs
    ) -> QuestionAnsweringModelOutput:
        """Tokens [B, T] to `start_logits` and `end_logits` [B, T]; with both positions int [B] also `loss`."""
        kwargs.pop("num_items_in_batch", None)
        outputs = self.model(input_ids, attention_mask, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


BlockformerDecoderConfig.register_for_auto_class()
BlockformerDecoderModel.register_for_auto_class("AutoModel")
BlockformerDecoderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
BlockformerDecoderForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
BlockformerDecoderForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
BlockformerDecoderForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
