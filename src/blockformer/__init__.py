"""Every classic Transformer, from one small set of blocks, natively Hugging Face."""
