"""One file per family of official checkpoints, on three bases: `llama_like`, `bert_like` and `encoder_decoder`."""
