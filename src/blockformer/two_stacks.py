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

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As the library does it, on both sides, or the source's alone where the target has a vocabulary of its own.

        Returns:
            The encoder's embeddings.
        """
        if self.config.decoder_vocab_size is not None:
            return self.get_encoder().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if not self.config.share_embeddings:
            self.get_decoder().resize_token_embeddings(embeddings.num_embeddings, mean_resizing=mean_resizing)
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
        source_size = self.config.vocab_size
        embeddings = self.get_decoder().resize_token_embeddings(new_num_tokens, mean_resizing=mean_resizing)
        self.config.vocab_size, self.config.decoder_vocab_size = source_size, embeddings.num_embeddings
        head = self.get_output_embeddings()
        if head is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, new_num_tokens, mean_resizing=mean_resizing))
        self.tie_weights()
        return embeddings
