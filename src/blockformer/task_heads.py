"""What a task puts on a stack: small modules, and heads that decoders and encoders share.

A shared head is a class that goes before the topology's base class, which makes `self.model`.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .losses import (
    IGNORED,
    are_many,
    chunked_cross_entropy,
    sequence_loss,
    span_loss,
    token_cross_entropy,
    without_padding,
)
from .normalization import make_norm
from .outputs import DeferredLogits
from .pretrained_model import BlockformerPreTrainedModel


class Pooler(nn.Module):
    """act(dense(first token's state)) (BERT, Devlin et al., 2019). [B, T, C] -> [B, C]."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.pooler_act]

    def forward(self, hidden_states):
        return self.act_fn(self.dense(hidden_states[:, 0]))


class HeadTransform(nn.Module):
    """norm(act(dense(x))) before a language model head, as BERT has it. [..., C] -> [..., C]."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, hidden_states):
        return self.norm(self.act_fn(self.dense(hidden_states)))


class LanguageModelHead(BlockformerPreTrainedModel):
    """From states to logits over the vocabulary: optional transform, optional scale, `lm_head`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    logits_bias: torch.Tensor | None

    def __init__(self, config):
        super().__init__(config)
        self.lm_head_transform = HeadTransform(config) if config.lm_head_transform else None
        vocab_size = config.get_text_config(decoder=True).vocab_size
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=config.lm_head_bias is True)
        self.register_buffer("logits_bias", torch.zeros(vocab_size) if config.lm_head_bias == "fixed" else None)

    def set_output_embeddings(self, new_embeddings):
        """Replace the head, as `resize_token_embeddings` does; the fixed bias of new tokens is 0."""
        super().set_output_embeddings(new_embeddings)
        if self.logits_bias is not None:
            more = new_embeddings.weight.shape[0] - len(self.logits_bias)
            self.logits_bias = nn.functional.pad(self.logits_bias, (0, more))

    def logits_of(self, hidden_states):
        """States [..., C] -> logits [..., V]."""
        logits = self.lm_head(self._before_head(hidden_states))
        return logits if self.logits_bias is None else logits + self.logits_bias.to(logits.device)

    def logits_and_loss(self, hidden_states, labels, num_items_in_batch=None, return_logits=None, label_smoothing=0.0):
        """States [..., C] and labels int [...] or None -> logits [..., V], loss or None.

        A loss in chunks never holds more than `losses.MAX_LOGITS` logits at once.

        Args:
            return_logits: True takes the loss from the logits of all tokens, False takes it in chunks and gives no
                logits. None takes it in chunks in training where the logits are many, and gives a `DeferredLogits`.
            num_items_in_batch, label_smoothing: see `losses.token_cross_entropy`.
        """
        if labels is None:
            return self.logits_of(hidden_states), None
        is_deferred = return_logits is None and self.training and not torch.compiler.is_compiling()
        is_deferred = is_deferred and are_many(labels.numel(), self.lm_head)
        if return_logits is not False and not is_deferred:
            logits = self.logits_of(hidden_states)
            return logits, token_cross_entropy(logits, labels, num_items_in_batch, label_smoothing)
        loss = self._loss_in_chunks(hidden_states, labels, num_items_in_batch, label_smoothing)
        logits = DeferredLogits(lambda: self.logits_of(hidden_states), self.lm_head.weight) if is_deferred else None
        return logits, loss

    def _loss_in_chunks(self, hidden_states, labels, num_items_in_batch, label_smoothing):
        labels = labels.to(hidden_states.device)
        if hidden_states.device.type == "cpu" and not torch.compiler.is_compiling():
            labelled = labels != IGNORED  # elsewhere their number would be a synchronisation
            hidden_states, labels = hidden_states[labelled], labels[labelled]
        states = self._before_head(hidden_states).flatten(0, -2)  # [N, C]
        bias = None if self.logits_bias is None else self.logits_bias.to(states.device)
        return chunked_cross_entropy(self.lm_head, states, labels.flatten(), num_items_in_batch, label_smoothing, bias)

    def _before_head(self, hidden_states):
        if self.lm_head_transform is not None:
            hidden_states = self.lm_head_transform(hidden_states)
        if self.config.logit_scale != 1:
            hidden_states = hidden_states * self.config.logit_scale
        return hidden_states


class SequenceClassification(BlockformerPreTrainedModel):
    """One row, one answer: a linear head on what `summarise` of the topology says of the row, [B, C]."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(head_dropout(config))
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=self.score_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Tokens [B, T] to `logits` [B, num_labels]; with labels (see `losses.sequence_loss`) also `loss`.

        The arguments not listed are those of `Stack.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(self.dropout(self.summarise(outputs, input_ids, attention_mask)))
        loss = None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.get("past_key_values"),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TokenClassification(BlockformerPreTrainedModel):
    """One answer a token: dropout and a linear head."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(head_dropout(config))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Tokens [B, T] to `logits` [B, T, num_labels]; with labels int [B, T] (-100: none) also `loss`.

        The arguments not listed are those of `Stack.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(self.dropout(outputs.last_hidden_state))
        labels = without_padding(labels, attention_mask)
        loss = None if labels is None else token_cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class QuestionAnswering(BlockformerPreTrainedModel):
    """Extractive question answering: the first and the last token of the answer's span."""

    def __init__(self, config):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        # The softmax over positions covers padding, in the official models too.
        self.model.skips_padding = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """Tokens [B, T] to `start_logits` and `end_logits` [B, T]; with both positions int [B] also `loss`.

        The arguments not listed are those of `Stack.forward`.
        """
        kwargs.pop("num_items_in_batch", None)  # counts labels, of which there are none here
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
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


def head_dropout(config) -> float:
    """The dropout before a classification head."""
    return config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout


def last_token_states(config, states, input_ids, attention_mask):
    """Each row's state at its last real token, whichever side is padded: [B, T, C] -> [B, C].

    Args:
        attention_mask: [B, T] of 0 and 1; without one the end is told by `config.pad_token_id` in `input_ids` [B, T].

    Raises:
        ValueError: several rows and neither to tell where they end.
    """
    batch, length = states.shape[:2]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        real = attention_mask[:, -length:].to(states.device) != 0
    elif input_ids is not None and config.pad_token_id is not None:
        real = input_ids.to(states.device) != config.pad_token_id
    elif batch == 1:
        return states[:, -1]
    else:
        raise ValueError("several rows, and nothing tells where each ends: give attention_mask or set pad_token_id.")
    last = (torch.arange(length, device=states.device) * real).argmax(-1)
    return states[torch.arange(batch, device=states.device), last]
