"""The decoder and what each task makes of it, registered for `trust_remote_code`.

Every module that an exported repo needs is imported here by name: some versions of the loader copy no others.
"""

import functools

import torch
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MoeCausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from .alibi import Alibi  # noqa: F401
from .attention import Attention  # noqa: F401
from .awq_linear import QuantizedLinear  # noqa: F401
from .axes import BLOCKS  # noqa: F401
from .compat import CACHE, OutputRecorder, is_readable, takes_cache
from .configuration_blockformer import BlockformerConfig  # noqa: F401
from .configuration_decoder import BlockformerDecoderConfig
from .dense_and_sparse import DenseAndSparse  # noqa: F401
from .experts import add_router_loss  # its @use_experts_implementation is looked for in this file
from .feed_forward import FeedForward  # noqa: F401
from .input_checks import cached_length, check_early_exit, check_room, own_layers
from .language_model_head import LanguageModelHead
from .latent_attention import LatentAttention  # noqa: F401
from .layer import Layer  # noqa: F401
from .losses import are_on_padding, shifted
from .multi_token import MultiTokenDrafts, multi_token_layers, multi_token_loss
from .normalization import RMSNorm  # noqa: F401
from .positions import LEARNED
from .pretrained_model import BlockformerPreTrainedModel
from .relative_bias import RelativeBias  # noqa: F401
from .relative_keys import RelativeKeys  # noqa: F401
from .release import VERSION  # noqa: F401
from .rotary import RotaryPositions  # noqa: F401
from .runtime import loop_by_runtime
from .scaled_embedding import ScaledEmbedding  # noqa: F401
from .sinusoidal import SinusoidalPositions  # noqa: F401
from .stack import Stack, last_tokens, states_at
from .task_heads import QuestionAnswering, SequenceClassification, TokenClassification
from .token_inputs import TokenInputs  # noqa: F401
from .varied_attention import VariedAttention  # noqa: F401
from .vector_positions import LearnedPositions  # noqa: F401

logger = logging.get_logger(__name__)


class BlockformerDecoderModel(Stack):
    """A decoder without a head: tokens [B, T] to states [B, T, C]. See `Stack.forward`."""

    config_class = BlockformerDecoderConfig
    _can_record_outputs = Stack._can_record_outputs | {"router_logits": OutputRecorder(None, class_name=".mlp.gate")}

    def __init__(self, config):
        super().__init__(config, not vars(config).get("bidirectional"), config.add_cross_attention)  # absent elsewhere
        if config.linear_bits is not None:
            config.keep_in_low_bits(self.layers)
        self.post_init()


class BlockformerDecoderPreTrainedModel(BlockformerPreTrainedModel):
    """A decoder with a head: `self.model` and what a task puts on it."""

    config_class = BlockformerDecoderConfig
    score_bias = False

    def __init__(self, config):
        super().__init__(config)
        self.model = BlockformerDecoderModel(config)


class BlockformerDecoderForCausalLM(LanguageModelHead, BlockformerDecoderPreTrainedModel, GenerationMixin):
    """A decoder with a language model head: `logits` [B, T, V] of the next token."""

    def __init__(self, config):
        super().__init__(config)
        self.mtp = multi_token_layers(config, BlockformerDecoderModel) if config.num_nextn_predict_layers else None
        self._is_stateful = any(getattr(layer.self_attn, "is_stateful", False) for layer in self.model.layers)
        self.post_init()

    @takes_cache
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
        task_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions | MoeCausalLMOutputWithPast:
        """Run the decoder and its head; the other arguments are as in `Stack.forward`.

        Args:
            labels: int [B, T], the inputs themselves (shifted here); only -100 is ignored, so padding should have it.
            logits_to_keep: compute logits only for this many last positions (0: all), or for the positions in a tensor.
            num_items_in_batch, return_logits: see `LanguageModelHead.logits_and_loss`; so is `label_smoothing`.
            output_router_logits: give `router_logits` of the experts' routers, [B * T, E] of each sparse layer, and
                `aux_loss`, the load-balancing loss, of which `router_aux_loss_coef` times goes into `loss`.
            shift_labels: int [B, T], labels that are already shifted, instead of `labels`.

        Returns:
            `logits` [B, T, V] and, with labels, `loss`, in training with `nextn_loss_weight` times the mean loss of the
            layers that predict further tokens; with experts in the library's class for them.
        """
        # Not in the signature: `Trainer` takes every argument with "label" in its name for a column of the data.
        shift_labels, label_smoothing = kwargs.pop("shift_labels", None), kwargs.pop("label_smoothing", 0.0)
        inputs: dict = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "past_key_values": past_key_values}
        source = {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
        targets = shifted(labels) if shift_labels is None and labels is not None else shift_labels
        inputs |= {"reads_padding": are_on_padding(targets, attention_mask), "return_dict": True}
        outputs = self.model(**inputs, **source, use_cache=use_cache, task_type_ids=task_type_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        own = {"labels": labels, "shift_labels": shift_labels}
        given = (targets, num_items_in_batch, return_logits, label_smoothing, own)
        logits, loss = self.logits_and_loss(outputs.last_hidden_state[:, keep], *given)
        if self.mtp is not None and self.training and loss is not None:
            further = multi_token_loss(self, outputs[0], inputs, targets, num_items_in_batch, label_smoothing, kwargs)
            loss = loss + self.config.nextn_loss_weight * further
        output = {name: getattr(outputs, name) for name in (CACHE, "hidden_states", "attentions")}
        output |= {"loss": loss, "logits": logits, "cross_attentions": outputs.cross_attentions or None}
        if not self.config.num_experts:
            return self.runtime.output(CausalLMOutputWithCrossAttentions, **output)
        add_router_loss(output, self.config, outputs.get("router_logits"), attention_mask, targets, num_items_in_batch)
        return self.runtime.output(MoeCausalLMOutputWithPast, **output)

    _sample = loop_by_runtime("_sample")
    _beam_search = loop_by_runtime("_beam_search")

    @functools.wraps(vars(GenerationMixin.generate).get("__wrapped__", GenerationMixin.generate))  # with gradients
    def generate(self, *args, **kwargs):
        if self.config.bidirectional:
            raise ValueError("generate needs bidirectional=False: this decoder only reads text.")
        depth = self.config.num_hidden_layers
        try:
            return super().generate(*args, **kwargs)
        finally:
            # An error while the model drafts with its first layers (`assistant_early_exit`) would leave it at these.
            if depth == len(self.model.layers):
                self.config.num_hidden_layers = depth

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # whose arguments `generate` looks up
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        """As in the library; a text that outgrows the frequencies of its cached keys is read again from the start."""
        cache, positions = kwargs.get(CACHE), kwargs.get("position_ids")
        if self.model.switches and cache is not None and positions is not None and (past := cache.get_seq_length()):
            is_outgrown = any(positions[:, :past].max() < at <= positions.max() for at in self.model.switches)
            kwargs |= {CACHE: None, "next_sequence_length": None} if is_outgrown else {}
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        if getattr(generation_config, "use_mtp", None):
            return MultiTokenDrafts(self, generation_config, kwargs["logits_processor"])
        return super()._get_candidate_generator(generation_config, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, length):
        mask, given = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
        _check_generation(self.config, generation_config, mask, given, length)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, length)
        if given is None and model_kwargs.get(CACHE) is not None:
            model_kwargs[CACHE] = self.runtime.cache(model_kwargs[CACHE])


def _check_generation(config, generation_config, attention_mask, past_key_values, length: int) -> None:
    """Refuse, before the first step, what would end in an error later or continue the padding instead of the text.

    At most `length` tokens, padding included, will be read. Values are read on an accelerator too, this once.
    """
    check_room(own_layers(past_key_values), length)
    if generation_config.num_beams < 1:
        raise ValueError(f"num_beams must be 1 or more, not {generation_config.num_beams}.")
    check_early_exit(generation_config, config.num_hidden_layers)
    if getattr(generation_config, "use_mtp", None) and not config.num_nextn_predict_layers:
        raise ValueError("use_mtp needs layers that draft, but num_nextn_predict_layers is 0: leave use_mtp out.")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        attention_mask = attention_mask.cpu()
        past = int(cached_length(past_key_values))
        has_tokens = (attention_mask[:, past:] != 0).any(-1)
        if not past and not has_tokens.all():
            raise ValueError(f"prompt {has_tokens.int().argmin()} is empty: its attention_mask is all 0; leave it out.")
        # A row of a cache that only padding is added to has ended, and others go on. A draft may hold padding tokens.
        if not (attention_mask[has_tokens, -1].all() or generation_config.is_assistant):
            raise ValueError("the prompts are padded on the right: set tokenizer.padding_side = 'left'.")
        length -= int((attention_mask == 0).sum(-1).min())
    limit = config.max_position_embeddings
    if config.position_type in LEARNED and length > limit:
        table = f"the table of learned positions (max_position_embeddings) has {limit}"
        fix = "shorten the prompt or lower max_new_tokens"
        raise ValueError(f"the text may become {length + 1} tokens long, but {table}: {fix}.")


class BlockformerDecoderForSequenceClassification(SequenceClassification, BlockformerDecoderPreTrainedModel):
    """A decoder that gives one answer for a row: `logits` [B, num_labels], from its last token (see `last_tokens`)."""

    def logits_of(self, outputs, input_ids, attention_mask):
        """The head reads all tokens before one is taken: a hook on it sees [B, T, num_labels], as in transformers."""
        logits = TokenClassification.logits_of(self, outputs, input_ids, attention_mask)
        return states_at(logits, last_tokens(self.config, input_ids, attention_mask, logits.shape[:2]))

    def reads_padding(self, inputs, labels):
        """Whether a row's last token is one that the mask hides."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        given = inputs["inputs_embeds"] if ids is None else ids
        if given is None or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] < given.shape[1]:
            return False
        if not is_readable(mask) or (ids is not None and not is_readable(ids)):
            return True
        last = last_tokens(self.config, ids, mask, given.shape[:2])
        hides = bool((mask[:, -given.shape[1] :].gather(1, last[:, None]) == 0).any())
        if hides and ids is None:
            what = "padding cannot be found in inputs_embeds: rows are classified by their last place, padding or not"
            logger.warning_once(f"{what}. Pad embeddings on the left.")
        return hides


class BlockformerDecoderForTokenClassification(TokenClassification, BlockformerDecoderPreTrainedModel):
    """A decoder that gives one answer for each token: `logits` [B, T, num_labels], labels int [B, T] (-100: none)."""


class BlockformerDecoderForQuestionAnswering(QuestionAnswering, BlockformerDecoderPreTrainedModel):
    """A decoder that finds the span of an answer: `start_logits` and `end_logits` [B, T]."""


for _auto_class, _target in BlockformerDecoderConfig.auto_classes.items():
    globals()[_target.rpartition(".")[2]].register_for_auto_class(_auto_class)
