"""Padding skipped: the packed run gives what the padded run gives, in results and in gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import SIZES, assert_close, assert_gradients_close, config, keep_padding, model, token_ids
from transformers import AttentionInterface, DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from blockformer import (
    BlockformerDecoderModel,
    BlockformerEncoderConfig,
    BlockformerEncoderDecoderConfig,
    BlockformerEncoderDecoderForConditionalGeneration,
    BlockformerEncoderModel,
)
from blockformer.engine.runtime import TrainingRuntime
from blockformer.engine.unpadding import Unpadding, find_unpadding
from blockformer.model.attention import eager_attention_forward
from blockformer.model.feed_forward import FeedForward
from blockformer.model.positions import flattened_positions, starts_of

pytestmark = pytest.mark.portable

POSITION_TYPES = (
    "rotary",
    "learned",
    "sinusoidal",
    "sinusoidal_halves",
    "sinusoidal_inclusive",
    "relative_bias",
    "learned_relative_bias",
    "relative_key",
    "relative_key_query",
    "none",
)


def masked(lengths, length, side="right"):
    """A mask [B, length] of 0 and 1 with so many ones in each row."""
    places = torch.arange(length)
    if side == "left":
        places = length - 1 - places
    return (places[None] < torch.tensor(lengths)[:, None]).long()


def both(ours, monkeypatch, *arguments, **keywords):
    """The packed and the padded result of a model that is prepared for training."""
    ours.prepare_for_training()
    packed = ours(*arguments, **keywords)
    with monkeypatch.context() as patch:
        keep_padding(patch)
        return packed, ours(*arguments, **keywords)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("position_type", POSITION_TYPES)
def test_results_and_gradients_are_those_of_the_padded_run(position_type, side, monkeypatch):
    rope = {} if position_type == "rotary" else {"rope_parameters": None}
    ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **rope)
    mask = masked([12, 5, 1, 9], 12, side)
    ids, real = token_ids(4, 12), mask.bool()
    packed, padded = both(ours, monkeypatch, ids, mask, use_cache=False)
    assert_close(packed.last_hidden_state[real], padded.last_hidden_state[real])
    assert not packed.last_hidden_state[~real].any()
    names, parameters = zip(*ours.named_parameters(), strict=True)
    direction, gradients = torch.randn(int(real.sum()), 64), []
    for outputs in (packed, padded):
        loss = (outputs.last_hidden_state[real] * direction).mean()  # the mean of their squares is always 1
        gradients.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients[1].values())
    assert_gradients_close(*gradients)


@pytest.fixture
def seen(monkeypatch):
    """The shapes that networks get, without a hook, which would have padding computed."""
    shapes, forward = [], FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda mlp, states: shapes.append(states.shape) or forward(mlp, states))
    return shapes


@pytest.mark.parametrize("prepare", ["prepare_for_training", "prepare_for_inference"])
def test_no_layer_works_on_padding(seen, prepare):
    ours = getattr(model("qwen3", cls=BlockformerDecoderModel, num_hidden_layers=1), prepare)()
    ours(token_ids(3, 10), masked([10, 2, 5], 10), use_cache=False)
    assert seen == [(1, 17, 64)]


ASKS = [{"use_cache": True}, {"use_cache": False, "output_hidden_states": True}]
ASKS += [{"use_cache": False, "head_mask": torch.ones(1, 4)}, {"use_cache": False, "output_attentions": True}]


@pytest.mark.parametrize("keywords", ASKS)
@pytest.mark.filterwarnings("ignore:.*output_attentions")
def test_the_padded_form_is_kept_where_the_caller_sees_it(keywords, seen):
    ours = model("qwen3", cls=BlockformerDecoderModel, num_hidden_layers=1).prepare_for_training()
    ours(token_ids(3, 10), masked([10, 2, 5], 10), **keywords)
    assert seen == [(3, 10, 64)]


class Foreign(torch.nn.Linear):
    """A layer of somebody else's, which may look at the rows of its input."""

    __module__ = "elsewhere"


def _hook(ours):
    ours.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)


def _pre_hook(ours):
    ours.layers[0].register_forward_pre_hook(lambda *_: None)


def _backward_hook(ours):
    ours.layers[0].mlp.register_full_backward_hook(lambda *_: None)


def _wrapped(ours):
    ours.layers[0].forward = ours.layers[0].forward


def _replaced(ours):
    ours.layers[0].self_attn.o_proj.__class__ = Foreign


def _embedded(ours):
    """Gradients of the embeddings, which somebody looks at token by token."""
    return {"inputs_embeds": torch.randn(3, 10, 64, requires_grad=True), "input_ids": None}


@pytest.mark.parametrize("watch", [_hook, _pre_hook, _backward_hook, _wrapped, _replaced, _embedded])
def test_padding_is_computed_where_somebody_watches(watch, seen):
    ours = model("qwen3", cls=BlockformerDecoderModel, num_hidden_layers=1).prepare_for_inference()
    given = {"input_ids": token_ids(3, 10), "attention_mask": masked([10, 2, 5], 10), "use_cache": False}
    ours(**given | (watch(ours) or {}))
    assert seen == [(3, 10, 64)]


@pytest.mark.parametrize("off", [True, False])
def test_nothing_is_skipped_unasked_or_with_fast_paths_off(off, seen, monkeypatch):
    ours = model("qwen3", cls=BlockformerDecoderModel, num_hidden_layers=1)
    if off:
        monkeypatch.setenv("BLOCKFORMER_FAST", "0")
        ours.prepare_for_training()
    ours(token_ids(3, 10), masked([10, 2, 5], 10), use_cache=False)
    assert seen == [(3, 10, 64)]


@pytest.mark.parametrize(
    ("mask", "packs"),
    [
        ([[0, 0, 0], [0, 0, 0]], False),
        ([[1, 1, 0], [1, 1, 1]], True),
        ([[0, 1, 1], [1, 1, 0]], True),
        ([[0, 1, 0], [0, 0, 0]], True),
        ([[1, 0, 1], [1, 1, 1]], False),
    ],
)
def test_when_a_mask_is_packed(mask, packs):
    assert (Unpadding.of_mask(torch.tensor(mask)) is not None) == packs


def test_a_mask_without_padding_says_so():
    unpadding = Unpadding.of_mask(torch.ones(2, 3), least=4)
    assert unpadding.indices is None
    assert unpadding.lengths == [3, 3]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5), left=st.booleans())
def test_unpack_undoes_pack(lengths, left):
    mask = masked(lengths, 7, "left" if left else "right")
    unpadding = Unpadding.of_mask(mask)
    if unpadding is None or unpadding.indices is None:
        assert set(lengths) == ({0} if unpadding is None else {7})
        return
    states = torch.randn(len(lengths), 7, 3)
    packed = unpadding.gather(states)
    assert packed.shape == (1, sum(lengths), 3)
    assert torch.equal(unpadding.scatter(packed), states * mask[..., None])
    assert [part.shape[2] for part in unpadding.split(packed[:, None])] == lengths


def test_states_may_end_on_another_device_than_the_mask_s():
    unpadding = Unpadding.of_mask(masked([2, 5], 5))
    assert unpadding.scatter(torch.zeros(1, 7, 3, device="meta")).shape == (2, 5, 3)


def test_rows_of_several_sequences():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert Unpadding.of_positions(positions).lengths == [3, 2, 5]
    assert Unpadding.of_positions(torch.arange(4)[None]) is None
    assert torch.equal(starts_of(positions).cumsum(-1), torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]]))
    starts = torch.tensor([0, 3, 5, 10], dtype=torch.int32)
    assert torch.equal(flattened_positions(starts, positions.shape), positions)


@torch.no_grad()
def test_padding_is_skipped_from_so_much_of_it_on_and_left_in_below(monkeypatch, usual_least_saving, seen):
    """2^21 by the tokens of padding times the squared width: 512 of width 64."""
    monkeypatch.setattr(TrainingRuntime, "least_saving", usual_least_saving)
    ours = model("bert", cls=BlockformerEncoderModel, num_hidden_layers=1).prepare_for_inference()
    for rows, length in ((48, 5), (65, 9), (64, 9)):
        ids, mask = token_ids(rows, length), masked([1] * (rows - 1) + [length], length)
        states = ours(ids, mask).last_hidden_state
        with monkeypatch.context() as patch:
            keep_padding(patch)
            assert_close(states[mask.bool()], ours(ids, mask).last_hidden_state[mask.bool()])
    assert [tuple(shape)[:2] for shape in seen[::2]] == [(48, 5), (1, 73), (64, 9)]


def test_only_where_the_result_is_the_same():
    config, mask = model("qwen3").config, masked([2, 4], 4)
    assert find_unpadding(config, mask, None) is not None
    assert find_unpadding(config, mask[:, None, None], None) is None
    assert find_unpadding(model("mistral").config, mask, None) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_labels_is_computed(side, monkeypatch):
    """`test_labels.py` compares the losses with those of the official classes."""
    ours = model("qwen3").train()
    mask, ids = masked([10, 2, 5], 10, side), token_ids(3, 10)
    found, expected = both(ours, monkeypatch, ids, attention_mask=mask, labels=ids)
    assert torch.equal(found.loss, expected.loss)
    assert found.logits[mask == 0].any()
    labels = ids.masked_fill(mask == 0, -100).masked_fill(torch.arange(10) == (mask == 0).sum(-1, keepdim=True), -100)
    assert not ours(ids, attention_mask=mask, labels=labels).logits[mask == 0].any()


def test_training_skips_padding_too(monkeypatch):
    ours = model("qwen3").train()
    mask = masked([10, 2, 5], 10)
    ids = token_ids(3, 10)
    labels = ids.masked_fill(mask == 0, -100)
    packed, padded = both(ours, monkeypatch, ids, attention_mask=mask, labels=labels)
    assert packed.past_key_values is None
    assert_close(packed.loss, padded.loss)


LENGTHS = (5, 1, 9, 3)
ENCODER_FIELDS = (*SIZES, "position_type", "rope_parameters")


def stack(cls, **settings):
    """A decoder, or an encoder of the same settings."""
    if cls is BlockformerDecoderModel:
        return model("qwen3", cls=cls, **settings).prepare_for_training()
    fields = {name: getattr(config(**settings), name) for name in ENCODER_FIELDS}
    torch.manual_seed(0)
    return cls(BlockformerEncoderConfig(**fields)).eval().prepare_for_training()


def flattened(**settings):
    """Four texts, and the one row that the library's collator makes of them."""
    texts = [token_ids(1, length, seed=length)[0] for length in LENGTHS]
    batch = DataCollatorWithFlattening(**settings)([{"input_ids": text.tolist()} for text in texts])
    return texts, dict(batch)


def assert_separate(ours, batch, texts):
    """The states of the one row are those of each text by itself."""
    states = ours(**batch).last_hidden_state[0].split(LENGTHS)
    for text, own in zip(texts, states, strict=True):
        assert_close(own, ours(text[None]).last_hidden_state[0])


FLATTENED = [
    {},
    {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    {"return_flash_attn_kwargs": True, "return_position_ids": False},
]


@pytest.mark.parametrize(
    ("position_type", "backend"),
    [
        (position_type, backend)
        for position_type in POSITION_TYPES
        for backend in ("sdpa", "eager", "flex_attention")
        if backend != "flex_attention" or "relative" not in position_type  # refused
    ],
)
@pytest.mark.parametrize("cls", [BlockformerDecoderModel, BlockformerEncoderModel])
def test_a_flattened_batch_is_separate_sequences(cls, position_type, backend, monkeypatch):
    rope = {} if position_type == "rotary" else {"rope_parameters": None}
    ours = stack(cls, position_type=position_type, **rope)
    ours.set_attn_implementation(backend)
    for is_padded in (False, True):
        if is_padded:
            keep_padding(monkeypatch)
        texts, batch = flattened()
        del batch["labels"]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            assert_separate(ours, batch, texts)


@pytest.mark.parametrize("settings", FLATTENED)
@pytest.mark.parametrize("cls", [BlockformerDecoderModel, BlockformerEncoderModel])
def test_whatever_the_collator_gives_along(cls, settings, monkeypatch):
    ours = stack(cls)
    for is_padded in (False, True):
        if is_padded:
            keep_padding(monkeypatch)
        texts, batch = flattened(**settings)
        del batch["labels"]
        assert_separate(ours, batch, texts)


def test_a_flattened_batch_with_a_window():
    ours = model("mistral", cls=BlockformerDecoderModel, sliding_window=4).prepare_for_training()
    texts, batch = flattened()
    del batch["labels"]
    assert_separate(ours, batch, texts)


def test_positions_of_one_row_hold_for_all():
    ours = stack(BlockformerEncoderModel)
    ids, positions = token_ids(3, 7), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    states = ours(ids, position_ids=positions).last_hidden_state
    assert_close(states[:, :3], ours(ids[:, :3]).last_hidden_state)
    assert_close(states[:, 3:], ours(ids[:, 3:]).last_hidden_state)


@pytest.mark.parametrize("training", [True, False])
def test_a_flattened_batch_has_the_loss_of_a_padded_one(training):
    """No token is to predict the next text's first: the collator puts -100 there."""
    ours = model("qwen3").prepare_for_training().train(training)
    texts, batch = flattened()
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = masked(LENGTHS, 9)
    assert (batch["labels"] == -100).sum() == len(LENGTHS)
    labels = ids.masked_fill(mask == 0, -100)
    assert_close(ours(**batch).loss, ours(ids, attention_mask=mask, labels=labels).loss)


@pytest.mark.parametrize("settings", FLATTENED)
def test_training_on_flattened_batches(settings, tmp_path):
    """`Trainer` ends with the weights that it has after padded batches."""
    texts = [{"input_ids": token_ids(1, length, seed=length)[0].tolist()} for length in (5, 1, 9, 3, 7, 2)]

    def pad(features):
        ids = [torch.tensor(feature["input_ids"]) for feature in features]
        ids, lengths = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), [len(each) for each in ids]
        mask = masked(lengths, max(lengths))
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100  # counted by nobody, as in the flattened batch
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    ended = []
    for collator in (DataCollatorWithFlattening(**settings), pad):
        ours = model("qwen3").prepare_for_training().train()
        trainer = Trainer(
            ours,
            TrainingArguments(
                tmp_path,
                num_train_epochs=2,
                per_device_train_batch_size=3,
                learning_rate=1e-3,
                optim="sgd",
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
            ),
            data_collator=collator,
            train_dataset=texts,
            eval_dataset=texts,
        )
        trainer.train()
        ended.append((trainer.evaluate()["eval_loss"], list(ours.parameters())))
    assert ended[0][0] == pytest.approx(ended[1][0], rel=1e-5)
    for one, other in zip(ended[0][1], ended[1][1], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("cls", [BlockformerDecoderModel, BlockformerEncoderModel])
def test_flash_attention_gets_the_lengths_and_no_mask(cls):
    ours, seen = stack(cls), []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, kwargs["cu_seq_lens_q"].tolist(), kwargs["max_length_k"], kwargs["position_ids"]))
        return eager_attention_forward(module, query, key, value, None, kwargs["scaling"])

    AttentionInterface.register("flash_attention_probe", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("flash_attention_probe", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    ours.config._attn_implementation = "flash_attention_probe"
    _, batch = flattened(return_flash_attn_kwargs=True)
    del batch["labels"]
    ours(**batch)
    assert len(seen) == ours.config.num_hidden_layers
    for mask, starts, longest, positions in seen:
        assert mask is None
        assert starts == [0, 5, 6, 15, 18]
        assert longest == 9
        assert torch.equal(positions, batch["position_ids"])


def test_cross_attention_takes_no_flattened_batch():
    ours = model("qwen3", cls=BlockformerDecoderModel, add_cross_attention=True)
    _, batch = flattened(return_flash_attn_kwargs=True)
    del batch["labels"]
    with pytest.raises(ValueError, match="cu_seq_lens_q is not supported with cross-attention"):
        ours(**batch, encoder_hidden_states=torch.randn(1, 4, 64))


@pytest.mark.parametrize("settings", FLATTENED)
def test_an_encoder_decoder_takes_no_flattened_batch(settings):
    """It would have to know which target belongs to which source."""
    small = {"vocab_size": 199, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "pad_token_id": 0}
    ours = BlockformerEncoderDecoderForConditionalGeneration(
        BlockformerEncoderDecoderConfig(**small, decoder_start_token_id=0)
    )
    _, batch = flattened(**settings)
    with pytest.raises(ValueError, match=r"is not supported by an encoder-decoder, .* give padded rows"):
        ours(**batch)


@torch.no_grad()
def test_windows_to_both_sides_with_and_without_padding():
    """An encoder's sliding layers see so many tokens to each side, in whichever way the mask is made."""
    windows = {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    ours = BlockformerEncoderModel(BlockformerEncoderConfig(**{**SIZES, **windows})).eval().prepare_for_training()
    ids, mask = token_ids(2, 16), masked([16, 11], 16)
    whole = ours(ids, attention_mask=mask).last_hidden_state
    packed = ids[mask.bool()][None]
    positions = torch.cat([torch.arange(int(count)) for count in mask.sum(-1)])[None]
    assert_close(ours(packed, position_ids=positions).last_hidden_state, whole[mask.bool()][None])
    row = ids[:1]
    near = ours(row).last_hidden_state
    changed = row.clone()
    changed[0, 0] = (row[0, 0] + 1) % 100
    far = ours(changed).last_hidden_state
    assert torch.equal(far[:, 7:], near[:, 7:])  # two layers reach six tokens far
    assert not torch.equal(far[:, 6], near[:, 6])
    ours.set_attn_implementation("eager")
    assert_close(ours(ids, attention_mask=mask).last_hidden_state[mask.bool()], whole[mask.bool()])
    assert_close(ours(packed, position_ids=positions).last_hidden_state, whole[mask.bool()][None])
