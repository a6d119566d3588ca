"""What every encoder-decoder has, with a head or without: its two sides, and how their vocabularies are resized."""

from .configuration_encoder_decoder import BlockformerEncoderDecoderConfig
from .pretrained_model import BlockformerPreTrainedModel


class TwoStacks(BlockformerPreTrainedModel):
    """What a model of two stacks has, with a head or without."""

    config_class = BlockformerEncoderDecoderConfig

    def get_encoder(self, modality=None):
        """The encoder's stack."""
        return getattr(self, "model", self).encoder

    def get_decoder(self):
        """The decoder's stack."""
        return getattr(self, "model", self).decoder

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        """As the library does it, for both stacks too: older versions overlook configs of the same class."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        for stack in (self.get_encoder(), self.get_decoder()):
            stack.set_attn_implementation(attn_implementation, *args, **kwargs)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As the library does it, on both sides, or the source's alone where the target has a vocabulary of its own.

        Returns:
            The encoder's embeddings.
        """
        if self.config.decoder_vocab_size is not None:
            embeddings = self.get_encoder().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self._set_size("vocab_size", embeddings.num_embeddings)
            return embeddings
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = embeddings.num_embeddings
        if not self.config.share_embeddings and self.get_decoder().config.vocab_size != size:
            self.get_decoder().resize_token_embeddings(size, mean_resizing=mean_resizing)
        self.get_decoder().config.vocab_size = size
        self._set_size("vocab_size", size)
        self.tie_weights()
        return embeddings

    def resize_decoder_token_embeddings(self, new_num_tokens, mean_resizing=True):
        """Change the size of the target's own vocabulary: the decoder's embeddings and the head.

        Returns:
            The decoder's embeddings.

        Raises:
            ValueError: both sides share a vocabulary.
        """
        if self.config.decoder_vocab_size is None:
            raise ValueError("decoder_vocab_size is None: both sides share a vocabulary; use resize_token_embeddings.")
        embeddings = self.get_decoder().resize_token_embeddings(new_num_tokens, mean_resizing=mean_resizing)
        head = self.get_output_embeddings()
        if head is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, new_num_tokens, mean_resizing=mean_resizing))
        self._set_size("decoder_vocab_size", embeddings.num_embeddings)
        self.tie_weights()
        return embeddings

    def _set_size(self, name, size):
        for part in (self.get_encoder(), getattr(self, "model", self), self):
            setattr(part.config, name, size)
