"""What a task puts on an encoder or a decoder.

A head is a class that goes before the topology's base class, which makes `self.model`.
"""

import torch
from torch import nn
from transformers import modeling_outputs
from transformers.utils import can_return_tuple

from .compat import takes_cache
from .language_model_head import HeadTransform
from .losses import sequence_loss, span_loss, token_cross_entropy, without_padding
from .positions import positions_from_mask
from .pretrained_model import BlockformerPreTrainedModel


class Classifier(BlockformerPreTrainedModel):
    """What all heads have that classify: `classifier_transform`, where the config wants it."""

    def __init__(self, config):
        super().__init__(config)
        self.classifier_transform = HeadTransform(config, config.output_size) if config.classifier_transform else None

    def before_classifier(self, states):
        """The input of the last linear layer: [..., C] -> [..., C]."""
        return states if self.classifier_transform is None else self.classifier_transform(states)


class Classification(Classifier):
    """A head that puts texts or tokens into classes: a subclass says by `logits_of` and `loss_of` how."""

    output_class: type[modeling_outputs.ModelOutput]

    @takes_cache
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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.SequenceClassifierOutputWithPast | modeling_outputs.TokenClassifierOutput:
        """Tokens [B, T] to `logits`; with labels also `loss`. The class says the shapes of both.

        The other arguments are as in `Stack.forward`.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "past_key_values": past_key_values}
        outputs = self.model(**inputs, use_cache=use_cache, task_type_ids=task_type_ids, **kwargs)
        logits = self.logits_of(outputs, input_ids, attention_mask)
        loss = None if labels is None else self.loss_of(logits, labels, attention_mask, num_items_in_batch)
        passed_on = {name: outputs.get(name) for name in self.output_class.__dataclass_fields__}
        return self.output_class(**passed_on | {"loss": loss, "logits": logits})


class SequenceClassification(Classification):
    """One row, one answer: a linear head on what `summarise` of the topology says of the row, [B, C].

    `logits` [B, num_labels]; for labels see `losses.sequence_loss`.
    """

    output_class = modeling_outputs.SequenceClassifierOutputWithPast

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.head_dropout)
        self.score = nn.Linear(config.output_size, config.num_labels, bias=self.score_bias)
        self.post_init()

    def logits_of(self, outputs, input_ids, attention_mask):
        return self.score(self.dropout(self.before_classifier(self.summarise(outputs, input_ids, attention_mask))))

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch):
        return sequence_loss(logits, labels, self.config, num_items_in_batch)


class TokenClassification(Classification):
    """One answer a token: dropout and a linear head. `logits` [B, T, num_labels]; labels int [B, T] (-100: none)."""

    output_class = modeling_outputs.TokenClassifierOutput

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.head_dropout)
        self.score = nn.Linear(config.output_size, config.num_labels)
        self.post_init()

    def logits_of(self, outputs, input_ids, attention_mask):
        return self.score(self.dropout(self.before_classifier(outputs.last_hidden_state)))

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch):
        return token_cross_entropy(logits, without_padding(labels, attention_mask), num_items_in_batch)


class QuestionAnswering(Classifier):
    """Extractive question answering: the first and the last token of the answer's span."""

    def __init__(self, config):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.output_size, 2)
        self.post_init()

    @takes_cache
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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.QuestionAnsweringModelOutput:
        """Tokens [B, T] to `start_logits` and `end_logits` [B, T]; with both positions int [B] also `loss`.

        The other arguments are as in `Stack.forward`.
        """
        kwargs.pop("num_items_in_batch", None)  # counts labels, of which there are none here
        if position_ids is None:
            given = input_ids if inputs_embeds is None else inputs_embeds
            position_ids = _with_padding(self.config, given, attention_mask)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "past_key_values": past_key_values}
        outputs = self.model(**inputs, use_cache=use_cache, task_type_ids=task_type_ids, **kwargs)
        states = self.before_classifier(outputs.last_hidden_state)
        start_logits, end_logits = self.qa_outputs(states).unbind(-1)
        loss = span_loss(start_logits, end_logits, start_positions, end_positions)
        recorded = (outputs.hidden_states, outputs.attentions)
        return modeling_outputs.QuestionAnsweringModelOutput(loss, start_logits, end_logits, *recorded)


def _with_padding(config, inputs, attention_mask):
    """The positions [B, T] of inputs [B, T, ...], with padding as in the official models; None without a mask.

    It has the last of the `position_offset` rows before the first token's (RoBERTa) or, without any, its index (BERT).
    """
    if inputs is None or not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return None
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = config.max_position_embeddings - 1
    padding = torch.full_like(index, -1) if config.position_offset else index.clamp(max=last)
    return torch.where(attention_mask != 0, positions_from_mask(attention_mask), padding)[:, -inputs.shape[1] :]
