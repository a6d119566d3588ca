"""The models and what each task makes of them, registered for `trust_remote_code`.

Every module that an exported repo needs is imported here by name: some versions of the loader copy no others.
"""

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
)
from transformers.utils import can_return_tuple

from .attention import Attention  # noqa: F401
from .base import BlockformerPreTrainedModel
from .cache import GrowingGenerationMixin
from .compat import causal_masks  # noqa: F401
from .config_checks import check_names  # noqa: F401
from .configuration_blockformer import BlockformerConfig  # noqa: F401
from .configuration_decoder import BlockformerDecoderConfig
from .configuration_encoder import BlockformerEncoderConfig
from .feed_forward import FeedForward  # noqa: F401
from .heads import (
    LanguageModelHead,
    Pooler,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    head_dropout,
    last_token_states,
)
from .inference import PackedLinear  # noqa: F401
from .inputs import check_generation
from .joint import Joint  # noqa: F401
from .kernels import fast_paths_enabled  # noqa: F401
from .layer import Layer  # noqa: F401
from .losses import share_of_items, shifted, token_cross_entropy, without_padding
from .normalization import RMSNorm  # noqa: F401
from .outputs import PreTrainingOutput, make_output
from .packing import Packing  # noqa: F401
from .positions import RotaryPositions  # noqa: F401
from .quantized_kernels import Kernel  # noqa: F401
from .quantized_linear import QuantizedLinear  # noqa: F401
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
    score_bias = False

    def __init__(self, config):
        super().__init__(config)
        self.model = BlockformerDecoderModel(config)

    def summarise(self, outputs, input_ids, attention_mask):
        """A row's summary [B, C]: the state at its last real token, after which the decoder has seen all of it."""
        return last_token_states(self.config, outputs.last_hidden_state, input_ids, attention_mask)


class BlockformerDecoderForCausalLM(LanguageModelHead, BlockformerDecoderPreTrainedModel, GrowingGenerationMixin):
    """A decoder with a language model head: logits of the next token."""

    def __init__(self, config):
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        token_type_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions:
        """Run the decoder and its head; the arguments not listed are those of `Stack.forward`.

        Args:
            labels: int [B, T], the inputs themselves (the shift is done here), -100 where there is no loss; padding
                never counts.
            logits_to_keep: compute logits for the last so many positions only (0: all), or for those of a tensor.
            num_items_in_batch: the count of labels over an optimizer step, as `Trainer` gives it.
            return_logits: with labels, whether to give logits too; see `LanguageModelHead.logits_and_loss`.
            shift_labels: int [B, T], labels that are already shifted, instead of `labels`.
            label_smoothing: share of the probability that is spread over the vocabulary.

        Returns:
            `logits` [B, T, V] and, with labels, `loss`. In training with many logits they are computed when they are
            read (see `outputs.LateOutput`).
        """
        # Not in the signature: `Trainer` takes every argument with "label" in its name for a column of the data.
        shift_labels, label_smoothing = kwargs.pop("shift_labels", None), kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if shift_labels is None:
            targets = None if labels is None else shifted(labels, attention_mask)
        else:
            targets = without_padding(shift_labels, attention_mask)
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state[:, keep], targets, num_items_in_batch, return_logits, label_smoothing
        )
        return make_output(
            CausalLMOutputWithCrossAttentions,
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.get("cross_attentions") or None,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
        check_generation(self.config, generation_config, mask, cache, max_cache_length)
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, mode, batch_size, max_cache_length
        )


class BlockformerDecoderForSequenceClassification(SequenceClassification, BlockformerDecoderPreTrainedModel):
    """A decoder that gives one answer for a row."""


class BlockformerDecoderForTokenClassification(TokenClassification, BlockformerDecoderPreTrainedModel):
    """A decoder that gives one answer for each token."""


class BlockformerDecoderForQuestionAnswering(QuestionAnswering, BlockformerDecoderPreTrainedModel):
    """A decoder that finds the span of an answer."""


class BlockformerEncoderModel(Stack):
    """An encoder without a head: tokens [B, T] to states [B, T, C] and, with `pooler_act`, a summary [B, C]."""

    config_class = BlockformerEncoderConfig

    def __init__(self, config, add_pooling_layer: bool = True):
        super().__init__(config, is_causal=False)
        self.pooler = Pooler(config) if config.pooler_act and add_pooling_layer else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """See `Stack.forward`; adds `pooler_output` [B, C], None without a pooler."""
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        states = outputs.last_hidden_state
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states,
            pooler_output=None if self.pooler is None else self.pooler(states),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BlockformerEncoderPreTrainedModel(BlockformerPreTrainedModel):
    """An encoder with a head: `self.model` and what a task puts on it."""

    config_class = BlockformerEncoderConfig
    score_bias = True
    # A head that does not read the pooler has none: a parameter without a gradient fails in DistributedDataParallel.
    reads_pooler = True

    def __init__(self, config):
        super().__init__(config)
        self.model = BlockformerEncoderModel(config, add_pooling_layer=self.reads_pooler)
        if not self.reads_pooler:
            self._keys_to_ignore_on_load_unexpected = [r"pooler\."]

    def summarise(self, outputs, input_ids, attention_mask):
        """A row's summary [B, C]: the pooler's or, without one, the state at the first token."""
        return outputs.last_hidden_state[:, 0] if outputs.pooler_output is None else outputs.pooler_output


class BlockformerEncoderForMaskedLM(LanguageModelHead, BlockformerEncoderPreTrainedModel):
    """An encoder that fills in masked tokens."""

    reads_pooler = False

    def __init__(self, config):
        super().__init__(config)
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
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Tokens [B, T] to `logits` [B, T, V]; with labels int [B, T] (-100: not masked) also `loss`.

        `return_logits` and `label_smoothing` are those of `LanguageModelHead.logits_and_loss`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        labels = without_padding(labels, attention_mask)
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state, labels, num_items_in_batch, return_logits, label_smoothing
        )
        parts = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return make_output(MaskedLMOutput, loss=loss, logits=logits, **parts)


class BlockformerEncoderForNextSentencePrediction(BlockformerEncoderPreTrainedModel):
    """An encoder that tells whether the second segment follows the first (class 0) or not (class 1)."""

    def __init__(self, config):
        super().__init__(config)
        self.next_sentence_score = nn.Linear(config.hidden_size, 2)
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
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> NextSentencePredictorOutput:
        """Tokens [B, T] to `logits` [B, 2]; with labels int [B] also `loss`."""
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.next_sentence_score(self.summarise(outputs, input_ids, attention_mask))
        loss = None if labels is None else token_cross_entropy(logits, labels.view(-1), num_items_in_batch)
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BlockformerEncoderForPreTraining(LanguageModelHead, BlockformerEncoderPreTrainedModel):
    """BERT's two tasks of pre-training together: masked tokens and the next sentence."""

    def __init__(self, config):
        super().__init__(config)
        self.next_sentence_score = nn.Linear(config.hidden_size, 2)
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
        next_sentence_label: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs,
    ) -> PreTrainingOutput:
        """Tokens [B, T] to `prediction_logits` [B, T, V] and `seq_relationship_logits` [B, 2].

        With `labels` int [B, T] (-100: not masked) and `next_sentence_label` int [B] also `loss`, the sum of both.
        `num_items_in_batch` counts the masked tokens of an optimizer step, so the next sentence's mean is weighted by
        this call's share of them.
        """
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        both = labels is not None and next_sentence_label is not None
        labels = without_padding(labels, attention_mask) if both else None
        logits, loss = self.logits_and_loss(outputs.last_hidden_state, labels, num_items_in_batch, return_logits)
        next_logits = self.next_sentence_score(self.summarise(outputs, input_ids, attention_mask))
        if loss is not None:
            next_loss = token_cross_entropy(next_logits, next_sentence_label.view(-1))
            loss = loss + next_loss * share_of_items(labels, num_items_in_batch)
        return make_output(
            PreTrainingOutput,
            loss=loss,
            prediction_logits=logits,
            seq_relationship_logits=next_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BlockformerEncoderForMultipleChoice(BlockformerEncoderPreTrainedModel):
    """An encoder that scores several continuations of a text and chooses one."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(head_dropout(config))
        self.score = nn.Linear(config.hidden_size, 1)
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
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        """Tokens [B, choices, T] to `logits` [B, choices]; with labels int [B] also `loss`.

        `inputs_embeds` [B, choices, T, C] may take the place of the tokens; the other inputs are [B, choices, T].
        """
        inputs, form = (input_ids, 3) if inputs_embeds is None else (inputs_embeds, 4)
        if inputs is None or inputs.dim() != form:
            raise ValueError("input_ids (or inputs_embeds) must be [batch, choices, length]: one text for each choice.")
        choices = inputs.shape[1]
        ids, mask, types, positions, embeds = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        )
        outputs = self.model(ids, mask, types, positions, embeds, **kwargs)
        summary = self.summarise(outputs, ids, mask)  # [B * choices, C]
        logits = self.score(self.dropout(summary)).view(-1, choices)
        loss = None if labels is None else token_cross_entropy(logits, labels.view(-1), num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BlockformerEncoderForSequenceClassification(SequenceClassification, BlockformerEncoderPreTrainedModel):
    """An encoder that gives one answer, or several, for a row."""


class BlockformerEncoderForTokenClassification(TokenClassification, BlockformerEncoderPreTrainedModel):
    """An encoder that gives one answer for each token."""

    reads_pooler = False


class BlockformerEncoderForQuestionAnswering(QuestionAnswering, BlockformerEncoderPreTrainedModel):
    """An encoder that finds the span of an answer."""

    reads_pooler = False


for _config in (BlockformerDecoderConfig, BlockformerEncoderConfig):
    _config.register_for_auto_class()
    for _auto_class, _target in _config.auto_classes.items():
        if _auto_class != "AutoConfig":
            globals()[_target.rpartition(".")[2]].register_for_auto_class(_auto_class)
