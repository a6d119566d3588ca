"""Contrastive search (Su et al., 2022), which transformers no longer has itself; a `custom_generate/generate.py`.

Of the k likeliest tokens the one that is likely and unlike all that was read. It repeats and picks rows of a cache,
which no other way of decoding does.
"""

import torch

print("this code runs")


def generate(model, inputs=None, attention_mask=None, penalty_alpha=0.6, top_k=4, max_new_tokens=8, **others):
    is_double = model.config.is_encoder_decoder
    if is_double:
        source = model.get_encoder()(inputs, attention_mask=attention_mask, return_dict=True)
        ids = torch.full((len(inputs), 1), model.config.decoder_start_token_id)
    else:
        ids, mask = inputs, attention_mask

    def run(tokens, cache, rows=1):
        asked = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True, "return_dict": True}
        if not is_double:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = model(tokens, attention_mask=mask, position_ids=positions, **asked)
            return out.logits[:, -1], out.hidden_states[-1], out.past_key_values
        states = source.last_hidden_state.repeat_interleave(rows, dim=0)
        asked |= {"encoder_outputs": (states,), "attention_mask": attention_mask.repeat_interleave(rows, dim=0)}
        out = model(decoder_input_ids=tokens, **asked)
        return out.logits[:, -1], out.decoder_hidden_states[-1], out.past_key_values

    logits, states, cache = run(ids, None)
    for _ in range(max_new_tokens):
        chances, candidates = logits.softmax(-1).topk(top_k)
        cache.batch_repeat_interleave(top_k)
        if not is_double:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1).repeat_interleave(top_k, dim=0)
        logits, following, cache = run(candidates.reshape(-1, 1), cache, top_k)
        before = torch.nn.functional.normalize(states.repeat_interleave(top_k, dim=0), dim=-1)
        alike = (before @ torch.nn.functional.normalize(following, dim=-1).transpose(1, 2)).squeeze(-1)
        if not is_double:
            alike = alike.masked_fill(mask[:, :-1] == 0, -1)
        score = (1 - penalty_alpha) * chances - penalty_alpha * alike.amax(-1).view(-1, top_k)
        best = score.argmax(-1)
        rows = torch.arange(len(best)) * top_k + best
        cache.batch_select_indices(rows)
        logits, states = logits[rows], torch.cat([states, following[rows]], dim=1)
        mask = mask[rows] if not is_double else None
        ids = torch.cat([ids, candidates.reshape(-1)[rows][:, None]], dim=1)
    return ids
