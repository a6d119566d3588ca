"""The records of official families, found by `index`, on three bases: `decoder`, `bert_like` and `encoder_decoder`."""
