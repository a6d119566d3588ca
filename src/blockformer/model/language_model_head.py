"""The language model head: from states to logits over the vocabulary, and their loss."""

import torch
from torch import nn
from transformers import initialization as init

from .feed_forward import make_activation
from .losses import token_cross_entropy
from .normalization import make_norm
from .pretrained_model import BlockformerPreTrainedModel


class HeadTransform(nn.Module):
    """norm(act(dense(x))) before a language model head, as BERT has it, or a classifier. [..., C] -> [..., width]."""

    def __init__(self, config, width: int):
        super().__init__()
        self.dense = nn.Linear(config.output_size, width, bias=config.head_transform_bias)
        self.act_fn = make_activation(config.hidden_act)
        self.norm = make_norm(config, width)

    def forward(self, hidden_states):
        return self.norm(self.act_fn(self.dense(hidden_states)))


def finished(logits, logits_bias, cap):
    """Logits [..., V] with the fixed bias [V] of a head that has one, or None, and the soft cap, or None."""
    logits = logits if logits_bias is None else logits + logits_bias.to(logits.device)
    return logits if cap is None else cap * torch.tanh(logits / cap)


class LanguageModelHead(BlockformerPreTrainedModel):
    """From states to logits over the vocabulary: optional transform, optional scale, `lm_head`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    logits_bias: torch.Tensor | None

    def __init__(self, config):
        super().__init__(config)
        width = config.token_size if config.lm_head_transform else config.output_size
        self.lm_head_transform = HeadTransform(config, width) if config.lm_head_transform else None
        vocab_size = config.get_text_config(decoder=True).vocab_size
        self.lm_head = nn.Linear(width, vocab_size, bias=config.lm_head_bias is True)
        self.logit_scale = config.logit_scale
        self.register_buffer("logits_bias", torch.zeros(vocab_size) if config.lm_head_bias == "fixed" else None)

    def init_tensors(self) -> None:
        """A fixed bias that no checkpoint holds is zero."""
        if self.logits_bias is not None:
            init.zeros_(self.logits_bias)

    def set_output_embeddings(self, new_embeddings):
        """Replace the head, as `resize_token_embeddings` does; the fixed bias of new tokens is 0."""
        super().set_output_embeddings(new_embeddings)
        if self.logits_bias is not None:
            more = new_embeddings.weight.shape[0] - len(self.logits_bias)
            self.logits_bias = nn.functional.pad(self.logits_bias, (0, more))

    def logits_of(self, hidden_states):
        """States [..., C] -> logits [..., V]."""
        # With the strides of a slice, even of one row, PyTorch takes a batched matmul and copies a frozen weight.
        states = self.before_head(hidden_states)
        logits = self.lm_head(states.contiguous().view(states.shape))
        return finished(logits, self.logits_bias, self.config.final_logit_softcapping)

    def logits_and_loss(self, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing, own=None):
        """States [..., C] and labels int [...] or None -> logits [..., V], loss or None.

        Args:
            return_logits: False gives no logits where there is a loss.
            num_items_in_batch, label_smoothing: see `losses.token_cross_entropy`.
            own: labels as the user's loss (`own_loss`) gets them, by name, or None for the usual loss.
        """
        if own and labels is not None and (own_loss := self.own_loss()) is not None:
            logits, own = self.logits_of(hidden_states), own | {"num_items_in_batch": num_items_in_batch}
            own = {name: value for name, value in own.items() if value is not None}
            return logits, own_loss(logits=logits, vocab_size=logits.shape[-1], **own)
        given = (hidden_states, labels, num_items_in_batch, return_logits, label_smoothing)
        if (found := self.runtime.loss(self, *given)) is not None:
            return found
        logits = self.logits_of(hidden_states)
        loss = None if labels is None else token_cross_entropy(logits, labels, num_items_in_batch, label_smoothing)
        return (logits if loss is None or return_logits is not False else None), loss

    def before_head(self, hidden_states):
        """The input of the head's matrix: [..., C] -> [..., C]."""
        states = hidden_states if self.lm_head_transform is None else self.lm_head_transform(hidden_states)
        return states if self.logit_scale == 1 else states * self.logit_scale
