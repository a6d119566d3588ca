"""`generate` as the fourth article writes it: for each new token, the whole text goes to the encoder and the decoder.

A converted repo carries this file as `custom_generate/generate.py`, where transformers looks for it.
"""

import torch


@torch.no_grad()
def generate(inputs=None, *, model, input_ids=None, max_new_tokens=20, temperature=1.0, top_k=None, **kwargs):
    """Continue texts, int [B, T] -> [B, T + max_new_tokens]; for a seed, the tokens that the article's code draws.

    Args:
        inputs, input_ids: the texts, by either name.
        model: the converted model.
        max_new_tokens: how many tokens to write. Nothing ends a text earlier.
        temperature: what logits are divided by.
        top_k: draw from so many of the likeliest tokens; None: from all.
        do_sample: False takes the likeliest token instead.
        kwargs: other arguments of the library's `generate`. `custom_generate` and `trust_remote_code`, by which a model
            without this loop calls it, are ignored.

    Raises:
        ValueError: an argument is set that the article's loop does not have.
    """
    do_sample = kwargs.pop("do_sample", None)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("custom_generate", "trust_remote_code")}
    idle = (None, False, model.generation_config)
    strange = [name for name, value in kwargs.items() if all(value is not one for one in idle)]
    strange = [name for name in strange if name != "attention_mask" or not bool((kwargs[name] == 1).all())]
    if strange:
        raise ValueError(f"the article's generate does not take {', '.join(sorted(strange))}; leave it out.")
    text = inputs if input_ids is None else input_ids
    for _ in range(max_new_tokens):
        seen = text[:, -model.config.max_position_embeddings :]
        logits = model(seen, decoder_input_ids=seen, use_cache=False, logits_to_keep=1).logits[:, -1] / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if do_sample is False:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logits.softmax(-1), num_samples=1)
        text = torch.cat((text, token), dim=1)
    return text
