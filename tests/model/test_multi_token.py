"""Layers that predict further tokens: the article's formulas, a loss for each, and drafts that change no token.

The oracle of the forward is a plain program that follows section 2.2 of arXiv 2412.19437; the library's own layers of
this kind are compared in `conversion/test_further.py`.
"""

import copy
import functools
import inspect

import pytest
import torch
from pairs import SIZES, assert_close, assert_gradients_close, model, token_ids
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

import blockformer
from blockformer.model.multi_token import MultiTokenDrafts

drafting = pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="this transformers has no use_mtp")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"layer_types": ["full_attention"] * 2 + ["sliding_attention"], "sliding_window": 5}
SHARED = {"nextn_final_norm": "shared", "nextn_layer": "first", "mlp_layer_types": ["dense", "sparse", "sparse"]}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "v_head_dim": 8, "num_key_value_heads": 4, "qk_norm": False}
LATENT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LATENT |= {"attention_type": None}


def predicting(count, seed=0, **settings):
    return model("qwen3", seed, num_nextn_predict_layers=count, **settings)


def test_the_padding_token_may_have_any_number():
    """The layers' own decoders have no vectors of tokens."""
    assert predicting(1, pad_token_id=96).mtp[0].decoder.config.pad_token_id is None


def norm(states, weight, eps):
    return states * (states.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def plain_layer(config, weights, states):
    """The article's TRM_k, here a layer of Qwen3, of one text [T, C]."""
    length, size, eps = len(states), config.head_dim, config.norm_eps
    read = norm(states, weights["self_attn_pre_norm.weight"], eps)
    query, key, value = ((read @ weights[f"self_attn.{n}_proj.weight"].T).view(length, -1, size) for n in "qkv")
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * angles
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(heads, name):
        heads = norm(heads, weights[f"self_attn.{name}_norm.weight"], eps)
        first, second = heads.chunk(2, dim=-1)
        pairs = torch.complex(first, second) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    groups = config.num_attention_heads // config.num_key_value_heads
    query, key = turned(query, "q"), turned(key, "k").repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * size**-0.5
    seen = torch.ones(length, length).tril().bool()
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1).transpose(0, 1)
    states = states + mixed.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T
    read = norm(states, weights["mlp_pre_norm.weight"], eps)
    gate, up = (read @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return states + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def plain_logits(a_model, ids):
    """Logits [T - k, V] of each layer k, of tokens [T]: equations 21 to 23, without padding or moving anything."""
    config, weights = a_model.config, {name: each.double() for name, each in a_model.state_dict().items()}
    embeddings = weights["model.embed_tokens.weight"][ids]
    states, found = a_model.double().model(ids[None]).last_hidden_state[0], []
    for depth in range(config.num_nextn_predict_layers):
        start, own = f"mtp.{depth}.", {}
        own = {name.removeprefix(start): each for name, each in weights.items() if name.startswith(start)}
        tokens = norm(embeddings[depth + 1 :], own["embedding_norm.weight"], config.norm_eps)
        both = torch.cat((tokens, norm(states[:-1], own["state_norm.weight"], config.norm_eps)), dim=-1)
        inner = "decoder.layers.0."
        layer = {name.removeprefix(inner): each for name, each in own.items() if name.startswith(inner)}
        states = plain_layer(config, layer, both @ own["projection.weight"].T)
        states = norm(states, own.get("decoder.norm.weight", weights["model.norm.weight"]), config.norm_eps)
        found.append(states @ weights["lm_head.weight"].T)
    return found


def with_random_norms(a_model):
    with torch.no_grad():
        for name, weight in a_model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return a_model


def further_loss(a_model, **inputs):
    """What the layers add to the loss of the same model in training."""
    whole = a_model.train()(**inputs).loss
    return whole - a_model.eval()(**inputs).loss


@torch.no_grad()
@pytest.mark.parametrize("final_norm", ["own", "shared"])
def test_each_layer_is_the_articles_and_the_loss_is_their_mean(final_norm):
    ours = with_random_norms(predicting(3, nextn_loss_weight=0.7, nextn_final_norm=final_norm)).double()
    ids = token_ids(1, 12)
    losses = [F.cross_entropy(each[:-1], ids[0, k + 2 :], reduction="sum") / 11 for k, each in
              enumerate(plain_logits(ours, ids[0]))]  # fmt: skip
    assert_close(further_loss(ours, input_ids=ids, labels=ids), 0.7 * sum(losses) / 3)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_loss(side):
    ours, ids = predicting(2), token_ids(2, 9)
    labels = ids.clone()
    by_row = [
        further_loss(ours, input_ids=ids[:1, :5], labels=ids[:1, :5]),
        further_loss(ours, input_ids=ids[1:], labels=ids[1:]),
    ]
    padded, mask = ids.clone(), torch.ones_like(ids)
    hidden = slice(0, 4) if side == "left" else slice(5, None)
    padded[0, 4:], padded[0, :5] = (ids[0, :5], padded[0, :5]) if side == "left" else (padded[0, 4:], ids[0, :5])
    padded[0, hidden], mask[0, hidden] = 0, 0
    labels = padded.masked_fill(mask == 0, -100)
    labels[0, 4 if side == "left" else 0] = -100  # the first token of a text is nobody's successor
    together = further_loss(ours, input_ids=padded, attention_mask=mask, labels=labels)
    assert_close(together, (by_row[0] * 4 + by_row[1] * 8) / 12)


@torch.no_grad()
def test_sequences_in_a_row_learn_nothing_of_each_other():
    ours, ids = predicting(2), token_ids(1, 12)
    parts = [ids[:, :5], ids[:, 5:]]
    apart = sum(further_loss(ours, input_ids=part, labels=part) * (part.shape[1] - 1) for part in parts) / 10
    labels = ids.clone()
    labels[0, 5] = -100  # as the library's collator marks the beginning of a sequence
    positions = torch.cat([torch.arange(part.shape[1])[None] for part in parts], dim=1)
    assert_close(further_loss(ours, input_ids=ids, labels=labels, position_ids=positions), apart)


def gradients(a_model):
    return {name: weight.grad for name, weight in a_model.named_parameters()}


def test_batches_that_a_step_accumulates_add_up_to_one_batch():
    ours, ids = predicting(1).train(), token_ids(2, 9)
    labels = ids.clone()
    labels[0, :5] = -100
    once = copy.deepcopy(ours)
    once(input_ids=ids, labels=labels).loss.backward()
    for row in range(2):
        ours(input_ids=ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=12).loss.backward()
    assert_gradients_close(gradients(ours), gradients(once))


def test_a_model_prepared_for_training_learns_the_same():
    plain, ids = predicting(2).train(), token_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    prepared = blockformer.prepare_for_training(copy.deepcopy(plain))
    for each in (plain, prepared):
        each(**given).loss.backward()
    assert_gradients_close(gradients(prepared), gradients(plain))
    checkpointed = copy.deepcopy(plain)
    checkpointed.zero_grad()
    checkpointed.gradient_checkpointing_enable()
    checkpointed(**given).loss.backward()
    assert_gradients_close(gradients(checkpointed), gradients(plain))


@torch.no_grad()
def test_inputs_embeds_learn_as_their_tokens():
    ours, ids = predicting(2), token_ids(2, 9)
    by_embeddings = further_loss(ours, inputs_embeds=ours.get_input_embeddings()(ids), labels=ids)
    assert_close(by_embeddings, further_loss(ours, input_ids=ids, labels=ids))


def counted(a_model):
    """A list that grows by the number of tokens of each forward of the stack."""
    lengths = []
    a_model.model.register_forward_pre_hook(
        lambda module, args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths


def written(a_model, ids, **settings):
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, **settings}
    return a_model.generate(ids, **settings)


KINDS = {"full": {}, "sliding": SLIDING, "experts": EXPERTS, "latent": LATENT, "scaled": {"embedding_scale": 3.0}}
KINDS["shared"] = {**EXPERTS, **SHARED}


@drafting
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_change_no_token(kind, count):
    ours = predicting(count, **KINDS[kind])
    for length in (1, 2, 9):
        ids = token_ids(1, length, seed=length)
        assert torch.equal(written(ours, ids, use_mtp=True), written(ours, ids))
    ids = F.pad(token_ids(1, 6), (3, 0))
    mask = (torch.arange(9) > 2).long()[None]
    assert torch.equal(written(ours, ids, attention_mask=mask, use_mtp=True), written(ours, ids, attention_mask=mask))
    sampled = {"do_sample": True, "top_k": 1}
    assert torch.equal(written(ours, ids[:, 3:], use_mtp=True, **sampled), written(ours, ids[:, 3:]))


TEXT = token_ids(1, 48, seed=3)


@functools.cache
def learned(count, kind="full"):
    """A model that knows `TEXT`."""
    a_model = predicting(count, **KINDS[kind])
    optimizer = torch.optim.Adam(a_model.train().parameters(), 3e-3)
    for _ in range(150):
        a_model(input_ids=TEXT, labels=TEXT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return a_model.eval()


@drafting
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_after_rejected_drafts_the_caches_hold_what_a_fresh_text_would(kind, monkeypatch):
    ours, usual, numbers = learned(3, kind), MultiTokenDrafts.get_candidates, []

    def checked(drafts, input_ids, **named):
        found = usual(drafts, input_ids, **named)
        if found[1] is not None:
            fresh = MultiTokenDrafts(ours, GenerationConfig(max_length=99), drafts.processors)
            states = ours.model(input_ids[:, :-1]).last_hidden_state
            output = type("Output", (), {"hidden_states": (states,)})
            again = usual(fresh, input_ids, **{**named, "model_outputs": output})
            assert torch.equal(found[0], again[0][:, : found[0].shape[1]])
            assert_close(found[1], again[1][:, : found[1].shape[1]])
            numbers.append(int(named["n_last_matches"]))
            wrong = input_ids.shape[1] + len(numbers) % 5
            if wrong < found[0].shape[1]:  # this draft and those after it will be rejected
                found[0][:, wrong] = 1
        return found

    monkeypatch.setattr(MultiTokenDrafts, "get_candidates", checked)
    for length in (1, 2, 9):
        assert torch.equal(written(ours, TEXT[:, :length], use_mtp=True, max_new_tokens=48 - length), TEXT)
    assert {*numbers} == {0, 1, 2, 3}


@drafting
def test_a_model_that_knows_its_text_reads_it_in_a_fraction_of_the_forwards():
    ours, text = learned(3), TEXT
    lengths = counted(ours)
    plain = written(ours, text[:, :8], max_new_tokens=40)
    assert torch.equal(plain, text)
    alone = len(lengths)
    assert torch.equal(written(ours, text[:, :8], max_new_tokens=40, use_mtp=True), plain)
    assert alone == 40
    assert len(lengths) - alone <= 12
    prepared = blockformer.prepare_for_inference(copy.deepcopy(ours))
    assert torch.equal(written(prepared, text[:, :8], max_new_tokens=40, use_mtp=True), plain)
    end = int(text[0, 20])
    ended = {"eos_token_id": end, "max_new_tokens": 40}
    assert torch.equal(written(ours, text[:, :8], use_mtp=True, **ended), written(ours, text[:, :8], **ended))
    cache = DynamicCache(config=ours.config)
    ours(text[:, :5], past_key_values=cache)
    continued = written(ours, text[:, :8], max_new_tokens=40, use_mtp=True, past_key_values=cache)
    assert torch.equal(continued, plain)


@drafting
def test_drafts_are_refused_where_there_are_none_to_make():
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0: leave use_mtp out"):
        written(model(), token_ids(1, 5), use_mtp=True)
    with pytest.raises(ValueError, match="batch_size = 1"):
        written(predicting(1), token_ids(2, 5), use_mtp=True)


STATES = {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "linear_num_key_heads": 2}
STATES |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def test_layers_with_a_state_learn_further_tokens_and_refuse_drafts():
    ours, ids = predicting(1, **STATES), token_ids(1, 9)
    further_loss(ours, input_ids=ids, labels=ids).backward()
    assert all(weight.grad is not None for weight in ours.mtp.parameters())
    if hasattr(GenerationConfig(), "use_mtp"):
        with pytest.raises(ValueError, match="stateful"):
            written(ours, ids, use_mtp=True)


REFUSED = {
    "learned positions": (
        {"position_type": "learned", "rope_parameters": None},
        "position_type='learned': use 'rotary'",
    ),
    "a parallel residual": ({"residual": "parallel"}, "residual='parallel': leave one of the two out"),
    "a last layer with a state": ({**STATES, "layer_types": STATES["layer_types"][::-1]}, "let that be of 'full_atten"),
    "a first layer with a state": ({**STATES, "nextn_layer": "first"}, "with a first layer of 'linear_attention'"),
    "no norm to share": ({"nextn_final_norm": "shared", "final_norm": False}, "needs final_norm=True: set it"),
    "narrow embeddings": ({"embedding_size": 32}, "needs embedding_size=64"),
    "both ways": ({"bidirectional": True}, "bidirectional=True: leave one"),
    "token types": ({"type_vocab_size": 2}, "type_vocab_size=2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_test_has_together_is_refused(what):
    settings, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        blockformer.BlockformerDecoderConfig(**{**SIZES, "num_nextn_predict_layers": 1, **settings})


@pytest.mark.parametrize("place", ["first", "last"])
def test_they_are_like_the_first_layer_or_the_last(place):
    ours = predicting(1, **EXPERTS, **{**SHARED, "nextn_layer": place})
    layer = {name: weight.shape for name, weight in ours.mtp[0].decoder.layers[0].named_parameters()}
    models = ours.model.layers[0 if place == "first" else -1]
    assert layer == {name: weight.shape for name, weight in models.named_parameters()}


def test_labels_of_some_tokens_are_refused_in_training():
    ours, ids = predicting(1), token_ids(1, 9)
    assert ours(ids, labels=ids[:, -4:], logits_to_keep=4).loss.isfinite()
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        ours.train()(ids, labels=ids[:, -4:], logits_to_keep=4)


def test_a_model_gets_the_layers_later(tmp_path):
    ours, ids = model(), token_ids(1, 9)
    ours.save_pretrained(tmp_path)
    kind = type(ours)
    longer = kind.from_pretrained(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(longer(ids).logits, ours(ids).logits)
    assert longer.mtp[0].projection.weight.std() > 0.1
    longer.save_pretrained(tmp_path / "longer")
    again = kind.from_pretrained(tmp_path / "longer")
    assert_close(further_loss(again, input_ids=ids, labels=ids), further_loss(longer, input_ids=ids, labels=ids))
    body = blockformer.BlockformerDecoderModel.from_pretrained(tmp_path / "longer")
    assert torch.equal(body(ids).last_hidden_state, ours.model(ids).last_hidden_state)


def test_the_layers_follow_the_models_attention():
    ours, ids = predicting(1), token_ids(1, 9)
    sdpa = further_loss(ours, input_ids=ids, labels=ids)
    ours.set_attn_implementation("eager")
    assert_close(further_loss(ours, input_ids=ids, labels=ids), sdpa)
    assert ours.mtp[0].decoder.config._attn_implementation == "eager"


def test_the_signature_of_the_drafts_is_the_librarys():
    if hasattr(GenerationConfig(), "use_mtp"):
        from transformers.generation.candidate_generator import MTPCandidateGenerator as Theirs

        ours, theirs = (inspect.signature(each.get_candidates).parameters for each in (MultiTokenDrafts, Theirs))
        assert ours.keys() == theirs.keys()
