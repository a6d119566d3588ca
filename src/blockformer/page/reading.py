"""A text in a model: its tokens, attention, each layer's predictions, norms of the states.

B batch, T query length, S key length, H heads, C hidden size, V vocabulary.
"""

import base64
import zlib
from typing import Any

import torch

from ..model.stack import Stack

LIKELIEST = 5
"""How many tokens are shown of a distribution."""
MAX_WRITTEN = 24
"""Tokens that an encoder-decoder writes at most."""
_SIGNS = {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW TO BAR}"}


@torch.no_grad()
def read(model: Any, tokenizer: Any, text: str, max_tokens: int) -> dict[str, Any]:
    """A text of at most so many tokens through a model, as data for the page.

    Attention is kept in steps of 1/255, so that a number shown is within 0.002 of what `output_attentions=True` gives.
    """
    both = model.config.is_encoder_decoder
    whole = len(tokenizer(text, verbose=False)["input_ids"])
    ids = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt", verbose=False)["input_ids"]
    if not ids.numel():
        raise ValueError("the tokenizer finds no token in the text (--text): give some words")
    model.set_attn_implementation("eager")
    body = getattr(model, model.base_model_prefix, model)
    stacks = [body] if isinstance(body, Stack) else [body.encoder, body.decoder]
    tokens, inputs = [ids[0]], {"input_ids": ids}
    if both:
        written = _written(model, ids, max_tokens)
        tokens, inputs = [ids[0], written[0]], {**inputs, "decoder_input_ids": written}
    last: dict[int, torch.Tensor] = {}
    hooks = [
        stack.norm.register_forward_pre_hook(lambda module, args, index=index: last.__setitem__(index, args[0]))
        for index, stack in enumerate(stacks)
        if stack.norm is not None
    ]
    try:
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    prefixes = ("encoder_", "decoder_") if both else ("",)
    sides, maps = [], []
    for index, (stack, prefix) in enumerate(zip(stacks, prefixes, strict=True)):
        states = [*output[f"{prefix}hidden_states"]]
        states[-1] = last.get(index, states[-1])  # before the final norm
        says = index == len(stacks) - 1 and hasattr(model, "logits_of") and hasattr(model, "lm_head")
        name = "decoder" if stack.is_causal else "encoder"
        side = {
            "name": name,
            "tokens": [shown(tokenizer, int(token)) for token in tokens[index]],
            "norms": [[float(f"{norm:.4g}") for norm in state[0].float().norm(dim=-1).tolist()] for state in states],
            "lens": lens(model, stack, states, tokenizer) if says else None,
        }
        sides.append(side)
        maps.append(packed(f"Self-attention{f' of the {name}' * both}", index, index, output[f"{prefix}attentions"]))
    if both and output.get("cross_attentions"):
        maps.append(packed("Cross-attention", 1, 0, output["cross_attentions"]))
    return {"sides": sides, "maps": maps, "note": _note(whole, ids.shape[1], both), "reads": model_words(model)}


def model_words(model: Any) -> str:
    """Whether there are words to be said, and which."""
    if not (hasattr(model, "logits_of") and hasattr(model, "lm_head")):
        return "This model has no language model head, so its layers predict no words."
    if model.config.is_decoder or model.config.is_encoder_decoder:
        return "The next token, as the final norm and the head read it off the residual stream after each layer."
    return "The token at this place, as the head reads it off the residual stream after each layer."


def _note(whole: int, kept: int, both: bool) -> str:
    words = (
        f"All {kept:,} tokens."
        if kept >= whole
        else f"The first {kept:,} of {whole:,} tokens: a page has 3 MB at most."
    )
    return f"{words} The decoder reads its own output, always the likeliest token." if both else words


def _written(model: Any, ids: torch.Tensor, max_tokens: int) -> torch.Tensor:
    start = model.config.decoder_start_token_id
    if model.can_generate():
        count = min(MAX_WRITTEN, max(max_tokens - 1, 1))
        return model.generate(ids, max_new_tokens=count, do_sample=False, num_beams=1)
    return torch.full((1, 1), start or 0)


def shown(tokenizer: Any, token: int) -> str:
    """A token as a person reads it, with signs for blanks; the tokenizer's own name where it is not text by itself."""
    raw = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    words = "" if raw is None else tokenizer.decode([token])
    if raw is not None and (not words or "\N{REPLACEMENT CHARACTER}" in words):
        words = raw
    return "".join(_SIGNS.get(letter, letter) for letter in words)[:40] or f"#{token}"


def lens(model: Any, stack: Any, states: list[torch.Tensor], tokenizer: Any) -> dict[str, Any]:
    """The likeliest tokens after each layer (the logit lens): states [1, T, C] -> tokens and shares of 10,000.

    Returns:
        `words`: the tokens that occur; `said`: for each state and place a list of word, share, word, share ...
    """
    numbers: dict[int, int] = {}
    said = []
    for state in states:
        state = state if stack.norm is None else stack.norm(state)
        likeliest = model.logits_of(state)[0].float().softmax(-1).topk(LIKELIEST)
        rows = []
        for shares, tokens in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
            pairs = zip(tokens, shares, strict=True)
            rows.append(
                [n for token, share in pairs for n in (numbers.setdefault(token, len(numbers)), round(share * 1e4))]
            )
        said.append(rows)
    return {"words": [shown(tokenizer, token) for token in numbers], "said": said}


def packed(name: str, queries: int, keys: int, attentions: Any) -> dict[str, Any]:
    """Probabilities of all layers, each [1, H, T, S], as bytes round(255 p), by layer, head, row and column."""
    steps = [(probabilities[0].float() * 255).round().to(torch.uint8) for probabilities in attentions]
    content = b"".join(layer.contiguous().numpy().tobytes() for layer in steps)
    packed_content = base64.b64encode(zlib.compress(content, 9)).decode()
    return {
        "name": name,
        "queries": queries,
        "keys": keys,
        "heads": [len(layer) for layer in steps],
        "data": packed_content,
    }
