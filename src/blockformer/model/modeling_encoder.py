"""The encoder and what each task makes of it, registered for `trust_remote_code`.

Every module that an exported repo needs is imported here by name: some versions of the loader copy no others.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import modeling_outputs
from transformers.utils import can_return_tuple

from .attention import Attention  # noqa: F401
from .axes import axis  # noqa: F401
from .compat import causal_masks  # noqa: F401
from .configuration_blockformer import BlockformerConfig  # noqa: F401
from .configuration_encoder import BlockformerEncoderConfig
from .disentangled import padding_of
from .feed_forward import make_activation
from .input_checks import check_inputs  # noqa: F401
from .language_model_head import LanguageModelHead
from .layer import Layer  # noqa: F401
from .losses import (
    IGNORED,
    are_on_padding,
    averaged,
    check_labels,
    refuse_smoothing,
    share_of_items,
    token_cross_entropy,
)
from .normalization import RMSNorm  # noqa: F401
from .positions import rotations_of  # noqa: F401
from .pretrained_model import BlockformerPreTrainedModel
from .relative_bias import RelativeBias  # noqa: F401
from .relative_keys import RelativeKeys  # noqa: F401
from .release import VERSION  # noqa: F401
from .rotary import RotaryPositions  # noqa: F401
from .rounded_frequencies import RoundedFrequencies  # noqa: F401
from .runtime import Runtime  # noqa: F401
from .scaled_embedding import ScaledEmbedding  # noqa: F401
from .sinusoidal import SinusoidalPositions  # noqa: F401
from .stack import Stack
from .task_heads import Classification, Classifier, QuestionAnswering, SequenceClassification, TokenClassification
from .token_dropout import TokenDropout
from .vector_positions import LearnedPositions  # noqa: F401


class Pooler(nn.Module):
    """act(dense(x)) of a row's summary, its first token (BERT, Devlin et al., 2019) or the mean of its tokens.

    States [B, T, C], mask [B, T] of 0 and 1 or None -> [B, C].
    """

    def __init__(self, config):
        super().__init__()
        self.pooling = config.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = make_activation(config.pooler_act)

    def forward(self, hidden_states, attention_mask=None):
        if self.pooling == "mean_of_pooled":
            return pooled("mean", self.act_fn(self.dense(hidden_states)), attention_mask)
        return self.act_fn(self.dense(pooled(self.pooling, hidden_states, attention_mask)))


def pooled(pooling: str, states, attention_mask):
    """The first state of each row, or the mean at its real tokens: [B, T, C] -> [B, C]."""
    if pooling == "first":
        return states[:, 0]
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return states.mean(1)
    weights = attention_mask.to(states)[..., None]
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


class BlockformerEncoderModel(Stack):
    """An encoder without a head: tokens [B, T] to states [B, T, C] and, with `pooler_act`, a summary [B, C]."""

    config_class = BlockformerEncoderConfig

    def __init__(self, config, add_pooling_layer: bool = True):
        super().__init__(config, is_causal=False)
        self.pooler = Pooler(config) if config.pooler_act and add_pooling_layer else None
        self.token_dropout = TokenDropout(config) if config.token_dropout is not None else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions:
        """See `Stack.forward`; adds `pooler_output` [B, C], None without a pooler."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "task_type_ids": task_type_ids, "position_ids": position_ids}
        outputs = super().forward(**inputs, return_dict=True, **kwargs)
        states = outputs.last_hidden_state
        return modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states,
            pooler_output=None if self.pooler is None else self.pooler(states, attention_mask),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def run_layers(self, hidden_states, encoder_hidden_states, layer_inputs, named):
        """As in any stack; with disentangled attention, padding begins at 0, as in DeBERTa's official class."""
        mask = layer_inputs.masks.get("full_attention")
        if self.has_distances and isinstance(mask, torch.Tensor):
            hidden_states = hidden_states.masked_fill(padding_of(mask)[:, 0], 0)
        return super().run_layers(hidden_states, encoder_hidden_states, layer_inputs, named)

    def _embed_tokens(self, input_ids, inputs_embeds, token_type_ids, task_type_ids, *where):
        """See `Stack._embed_tokens`; `where` are the mask and the positions that say which tokens are a text's."""
        if self.token_dropout is not None and inputs_embeds is None:
            inputs_embeds = self.token_dropout(self.embed_tokens(input_ids), input_ids, *where)
        return super()._embed_tokens(input_ids, inputs_embeds, token_type_ids, task_type_ids)


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

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As any model is loaded; where both kinds of heads have a transform, one begins with the other's.

        ModernBERT's official classes have it under one name.
        """
        source, own, other = pretrained_model_name_or_path, "lm_head_transform", "classifier_transform"
        if issubclass(cls, Classifier):
            own, other = other, own
        if kwargs.get("key_mapping") or not _has_both_transforms(cls, source, kwargs):
            return super().from_pretrained(source, *model_args, **kwargs)
        kwargs["key_mapping"] = {rf"^{other}\.": f"{own}."}
        loaded = super().from_pretrained(source, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.__dict__.pop("_weight_conversions", None)  # by which it would be saved under the other head's names
        return loaded

    def summarise(self, outputs, input_ids, attention_mask):
        """A row's summary [B, C]: the pooler's or, without one, the first state or the mean."""
        if outputs.pooler_output is not None:
            return outputs.pooler_output
        return pooled(self.config.pooling, outputs.last_hidden_state, attention_mask)


def _has_both_transforms(model_class, source, options) -> bool:
    """Whether language model heads and classifiers of this checkpoint have a transform, both of one width."""
    config = options.get("config")
    if not hasattr(config, "classifier_transform"):
        place = ("cache_dir", "revision", "subfolder", "token", "local_files_only")
        where = {name: options[name] for name in place if name in options}
        try:
            config = model_class.config_class.from_pretrained(config or source, **where)
        except (OSError, TypeError, ValueError):  # loading says what is wrong
            return False
    have_one = config.lm_head_transform and config.classifier_transform
    return bool(have_one and config.token_size == config.output_size)


class MaskedTokens(LanguageModelHead, BlockformerEncoderPreTrainedModel):
    """An encoder with the head for masked tokens."""

    def fill_in(self, inputs, labels, num_items_in_batch, return_logits, label_smoothing, **kwargs):
        """The model's inputs by name, and labels int [B, T] or None -> its outputs, logits [B, T, V], loss or None."""
        if self.config.lm_head_bias is True and getattr(self.lm_head, "bias", True) is None:
            self._restore_bias()
        inputs = inputs | {"reads_padding": are_on_padding(labels, inputs["attention_mask"])}
        outputs = self.model(**inputs, return_dict=True, **kwargs)
        states = outputs.last_hidden_state
        given = (labels, num_items_in_batch, return_logits, label_smoothing, {"labels": labels})
        return outputs, *self.logits_and_loss(states, *given)

    def _restore_bias(self):
        """Put the head's bias into the layers without one that PEFT's `ensure_weight_tying` puts in its place.

        A head of the caller's may have none.
        """
        if hasattr(self.lm_head, "original_module"):
            for layer in self.lm_head.modules_to_save.values():
                layer.bias = self.lm_head.original_module.bias if layer.bias is None else layer.bias
        elif self.lm_head.weight is self.get_input_embeddings().weight:
            what = (
                "PEFT's ensure_weight_tying put one without a bias in its place, and nothing ran before it was merged"
            )
            raise ValueError(f"lm_head has lost its bias: {what}. Call the model once before merge_and_unload().")


class BlockformerEncoderForMaskedLM(MaskedTokens):
    """An encoder that fills in masked tokens: `logits` [B, T, V], labels int [B, T] (-100: none)."""

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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.MaskedLMOutput:
        """Tokens [B, T] to `logits` [B, T, V]; with labels int [B, T] (-100: not masked) also `loss`.

        `return_logits` and `label_smoothing` are as in `LanguageModelHead.logits_and_loss`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds, "task_type_ids": task_type_ids}
        given = (labels, num_items_in_batch, return_logits, label_smoothing)
        outputs, logits, loss = self.fill_in(inputs, *given, **kwargs)
        parts = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self.runtime.output(modeling_outputs.MaskedLMOutput, loss=loss, logits=logits, **parts)


class BlockformerEncoderForNextSentencePrediction(Classification, BlockformerEncoderPreTrainedModel):
    """An encoder that tells whether the second segment follows the first (class 0) or not (class 1).

    `logits` [B, 2], labels int [B].
    """

    output_class = modeling_outputs.NextSentencePredictorOutput

    def __init__(self, config):
        super().__init__(config)
        self.next_sentence_score = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def logits_of(self, outputs, input_ids, attention_mask):
        return self.next_sentence_score(self.summarise(outputs, input_ids, attention_mask))

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch, label_smoothing):
        return token_cross_entropy(logits, labels.view(-1), num_items_in_batch, label_smoothing)


@dataclass
class PreTrainingOutput(modeling_outputs.ModelOutput):
    """Logits of masked tokens [B, T, V] and of the next sentence [B, 2], under the names that BERT's users know."""

    loss: torch.FloatTensor | None = None
    prediction_logits: torch.FloatTensor | None = None
    seq_relationship_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class BlockformerEncoderForPreTraining(MaskedTokens):
    """BERT's pre-training: `prediction_logits` [B, T, V] of masked tokens, `seq_relationship_logits` [B, 2]."""

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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> PreTrainingOutput:
        """Tokens [B, T] to `prediction_logits` [B, T, V] and `seq_relationship_logits` [B, 2].

        With `labels` int [B, T] (-100: not masked) and `next_sentence_label` int [B] also `loss`, the sum of both.
        `num_items_in_batch` counts the masked tokens of an optimizer step, so the next sentence's mean is weighted by
        this call's share of them. `label_smoothing` smooths both; it and `return_logits` are as in
        `LanguageModelHead.logits_and_loss`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        labels = None if next_sentence_label is None else labels
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds, "task_type_ids": task_type_ids}
        given = (labels, num_items_in_batch, return_logits, label_smoothing)
        outputs, logits, loss = self.fill_in(inputs, *given, **kwargs)
        next_logits = self.next_sentence_score(self.summarise(outputs, input_ids, attention_mask))
        if loss is not None:
            next_loss = token_cross_entropy(next_logits, next_sentence_label.view(-1), None, label_smoothing)
            loss = loss + next_loss * share_of_items(labels, num_items_in_batch, loss.device)
        scores = {"prediction_logits": logits, "seq_relationship_logits": next_logits}
        parts = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self.runtime.output(PreTrainingOutput, loss=loss, **scores, **parts)


class BlockformerEncoderForReplacedTokenDetection(Classification, BlockformerEncoderPreTrainedModel):
    """Tells replaced tokens from the text's own (ELECTRA's discriminator, Clark et al., 2020).

    `logits` [B, T], above 0 where it finds a replaced one; labels int [B, T] of 0 and 1 (-100: none). Padding is left
    out, as in the official class. `num_items_in_batch` may count labels on it: each call then weighs as its share.
    """

    output_class = modeling_outputs.TokenClassifierOutput
    reads_pooler = False

    def __init__(self, config):
        super().__init__(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = make_activation(config.hidden_act)
        self.score = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def logits_of(self, outputs, input_ids, attention_mask):
        return self.score(self.act_fn(self.dense(outputs.last_hidden_state))).squeeze(-1)

    def loss_of(self, logits, labels, attention_mask, num_items_in_batch, label_smoothing):
        refuse_smoothing(label_smoothing, "these are right or wrong")
        labels = labels.to(logits.device)
        check_labels(labels, 2)
        real = labels
        if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == labels.shape:
            real = labels.masked_fill(attention_mask.to(labels.device) == 0, IGNORED)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.binary_cross_entropy_with_logits(logits, real.clamp(min=0).to(logits), reduction="none")
        mean = averaged(losses[real != IGNORED].sum(), real)
        return mean * share_of_items(labels, num_items_in_batch, mean.device)


class BlockformerEncoderForMultipleChoice(Classifier, BlockformerEncoderPreTrainedModel):
    """An encoder that scores several continuations of a text and chooses one: `logits` [B, choices]."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.head_dropout)
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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.MultipleChoiceModelOutput:
        """Tokens [B, choices, T] to `logits` [B, choices]; with labels int [B] also `loss`.

        `inputs_embeds` [B, choices, T, C] may take the place of the tokens; the other inputs are [B, choices, T].
        `label_smoothing` is as in `losses.token_cross_entropy`.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        inputs, form = (input_ids, 3) if inputs_embeds is None else (inputs_embeds, 4)
        if inputs is None or inputs.dim() != form:
            raise ValueError("input_ids (or inputs_embeds) must be [batch, choices, length]: one text for each choice.")
        choices = inputs.shape[1]
        ids, mask, *others = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, task_type_ids)
        )
        outputs = self.model(ids, mask, *others, return_dict=True, **kwargs)
        summary = self.summarise(outputs, ids, mask)  # [B * choices, C]
        logits = self.score(self.dropout(self.before_classifier(summary))).view(-1, choices)
        loss = None
        if labels is not None:
            loss = token_cross_entropy(logits, labels.view(-1), num_items_in_batch, label_smoothing)
        return modeling_outputs.MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BlockformerEncoderForSequenceClassification(SequenceClassification, BlockformerEncoderPreTrainedModel):
    """An encoder that gives one answer, or several, for a row: `logits` [B, num_labels]."""


class BlockformerEncoderForTokenClassification(TokenClassification, BlockformerEncoderPreTrainedModel):
    """An encoder that gives one answer for each token: `logits` [B, T, num_labels], labels int [B, T] (-100: none)."""

    reads_pooler = False


class BlockformerEncoderForQuestionAnswering(QuestionAnswering, BlockformerEncoderPreTrainedModel):
    """An encoder that finds the span of an answer: `start_logits` and `end_logits` [B, T]."""

    reads_pooler = False


for _auto_class, _target in BlockformerEncoderConfig.auto_classes.items():
    globals()[_target.rpartition(".")[2]].register_for_auto_class(_auto_class)
BlockformerEncoderForReplacedTokenDetection.register_for_auto_class("AutoModelForPreTraining")
