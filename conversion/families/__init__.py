"""One file a family of official checkpoints, over three bases: `llama_like`, `bert_like` and `encoder_decoder`."""
