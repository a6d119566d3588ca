"""What a task puts on an encoder or a decoder.

A head is a class that goes before the topology's base class, which makes `self.model`.
"""

import torch
from torch import nn
from transformers import modeling_outputs
from transformers.utils import can_return_tuple

from .compat import takes_cache
from .language_model_head import HeadTransform
from .losses import are_on_padding, refuse_smoothing, sequence_loss, span_loss, token_cross_entropy
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

    def reads_padding(self, inputs, labels) -> bool:
        """Whether the head reads the states of padding, for these arguments of the model and labels or None."""
        return False

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

        `label_smoothing` is as in `losses.token_cross_entropy`, the other arguments as in `Stack.forward`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        inputs: dict = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "past_key_values": past_key_values}
        inputs |= {"reads_padding": self.reads_padding(inputs, labels)}
        outputs = self.model(**inputs, use_cache=use_cache, task_type_ids=task_type_ids, return_dict=True, **kwargs)
        logits, loss = self.logits_of(outputs, input_ids, attention_mask), None
        if labels is not None:
            loss = self.loss_of(logits, labels, attention_mask, num_items_in_batch, label_smoothing)
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

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch, label_smoothing):
        if (own_loss := self.own_loss()) is not None:
            return own_loss(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return sequence_loss(logits, labels, self.config, num_items_in_batch, label_smoothing)


class TokenClassification(SequenceClassification):
    """One answer per token, by the same head: `logits` [B, T, num_labels]; labels int [B, T] (-100: none)."""

    output_class = modeling_outputs.TokenClassifierOutput
    score_bias = True

    def logits_of(self, outputs, input_ids, attention_mask):
        return self.score(self.dropout(self.before_classifier(outputs.last_hidden_state)))

    def reads_padding(self, inputs, labels):
        return are_on_padding(labels, inputs["attention_mask"])

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch, label_smoothing):
        if (own_loss := self.own_loss()) is not None:
            return own_loss(logits, labels, self.config)
        return token_cross_entropy(logits, labels, num_items_in_batch, label_smoothing)


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
        refuse_smoothing(kwargs.pop("label_smoothing", 0.0), "a span's are two positions")
        inputs: dict = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "past_key_values": past_key_values}
        inputs |= {"reads_padding": True}
        outputs = self.model(**inputs, use_cache=use_cache, task_type_ids=task_type_ids, return_dict=True, **kwargs)
        start_logits, end_logits = self.qa_outputs(self.before_classifier(outputs.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (self.own_loss() or span_loss)(start_logits, end_logits, start_positions, end_positions)
        recorded = (outputs.hidden_states, outputs.attentions)
        return modeling_outputs.QuestionAnsweringModelOutput(loss, start_logits, end_logits, *recorded)
