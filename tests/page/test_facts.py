"""What a page says of a model against the model itself: operations, shapes, parameters, fields."""

import pytest
import torch
from own_blocks import ALL, forgotten_after, register_all
from sizes import TINY
from torch.utils.flop_counter import FlopCounterMode

import blockformer
from blockformer.conversion.plan import architecture_of
from blockformer.inputs import inputs_of
from blockformer.model.axes import axes
from blockformer.page.build import MAX_BYTES, page
from blockformer.page.differences import differences
from blockformer.page.dry_run import dry_run
from blockformer.page.facts import Facts, spans
from blockformer.page.fields import fields_of
from blockformer.pictures.canvas import short
from blockformer.summary import SHOWN, describe, on_paper

NAMES = (
    "albert bert-decoder deberta-v2 gemma3_text gpt2 gpt_neox gpt_oss modernbert mpnet mpt qwen2_moe qwen3 t5 t5gemma"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_that_torch_counts(name):
    """Of each box, too; and of the token after the text, with a cache."""
    model = on_paper(blockformer.preset(name))
    with FlopCounterMode(display=False) as counter:
        text, step = dry_run(model, 11, 7)
    assert sum(text.flops.values()) + (sum(step.flops.values()) if step else 0) == counter.get_total_flops()
    counts = {key.partition(".")[2]: sum(count.values()) for key, count in counter.get_flop_counts().items()}
    for path in (name for name, _ in model.named_modules() if name.endswith(("attn", "mlp", "lm_head"))):
        assert text.of(path) + (step.of(path) if step else 0) == counts[path], path


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {"num_key_value_heads": 2}),
        ("t5", {}),
        ("bert", {}),
        ("mixtral", {}),
        ("modernbert", {}),
        ("albert", {}),
    ],
)
def test_shapes_are_those_of_hooks_on_a_real_forward(name, settings):
    sizes = TINY if name == "albert" else {**TINY, "head_dim": 8}
    config = blockformer.preset(
        name, **sizes, vocab_size=99, **settings, pad_token_id=0, eos_token_id=1, bos_token_id=1
    )
    facts = Facts(config, 6, 5)
    config._attn_implementation = "eager"
    model = getattr(blockformer, architecture_of(config))(config).eval()
    seen = {}

    def hook(path):
        def record(module, args, kwargs, output):
            read = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
            wrote = output[0] if isinstance(output, tuple) else output
            seen.setdefault(path, (list(read.shape), list(wrote.shape)))

        return record

    paths = {box.path for box in facts.parts.boxes()}
    for path, module in model.named_modules():
        if path in paths or path.rpartition(".")[0] in paths:
            module.register_forward_hook(hook(path), with_kwargs=True)
    lengths = {True: 6, False: 5 if config.is_encoder_decoder else 6}
    inputs = {each.name: each.example(1, lengths[each.of_source]) for each in inputs_of(config)}
    output = model(**inputs, output_attentions=True)
    for box in facts.boxes():
        if box["kind"] in ("positions",):
            continue
        for row in box["shapes"]:
            if row[0].startswith("probabilities"):
                maps = output.get("attentions") or output.encoder_attentions
                assert box["role"] != "encoder.self_attn" or row[2] == str(list(maps[0].shape))
            else:
                path = f"{box['path']}.{row[0]}".rstrip(".")
                assert row[1:] == [str(shape) for shape in seen[path]], path


def numbers_cached(model):
    """What a text of three tokens leaves in the cache of a model on the meta device, by token."""
    tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
    names = ("decoder_input_ids", "input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    cache = model(**dict.fromkeys(names, tokens), use_cache=True).past_key_values
    own = getattr(cache, "self_attention_cache", cache)
    with_keys = [layer for layer in own.layers if hasattr(layer, "keys")]
    return sum(layer.keys.numel() + layer.values.numel() for layer in with_keys) // 3


@pytest.mark.parametrize("name", ["bert", "qwen3", "t5", "gpt_oss", "modernbert", "qwen3_5_text", "lfm2", "nemotron_h"])
def test_parameters_and_cache_are_those_of_the_summary(name):
    config = blockformer.preset(name)
    facts, summary = Facts(config, 8), describe(blockformer.preset(name))
    totals = {key: word for key, _, word in facts.totals()}
    assert totals["parameters"].startswith(f"{summary.parameters:,};")
    assert totals["weights"] == f"in float32: {summary.memory['float32']:,} bytes"
    if summary.cache:
        assert summary.cache["float32"] == 4 * numbers_cached(facts.model)
        assert totals["cache for a token"].startswith(f"{summary.cache['float32']:,} bytes")
        boxes = [box for box in facts.boxes() if "cache" in box and not box["role"].endswith("cross_attn")]
        assert sum(box["cache"] * len(box["layers"]) for box in boxes) == summary.cache["float32"]
    assert totals.get("state for a text", "").startswith(f"{summary.state['float32']:,} bytes" if summary.state else "")
    states = sum(box.get("state", 0) * len(box["layers"]) for box in facts.boxes())
    assert states == summary.state.get("float32", 0)
    own = sum(box["parameters"] * max(len(box["layers"]), 1) for box in facts.boxes())
    tied = facts.model.get_input_embeddings().weight.numel() * (
        (facts.parts.has_language_model_head and bool(config.tie_word_embeddings)) + (len(facts.parts.stacks) > 1)
    )
    assert own == summary.parameters + tied


@pytest.fixture
def blocks():
    with forgotten_after():
        register_all()
        yield


@pytest.mark.usefixtures("blocks")
def test_every_field_that_describes_a_model_steers_a_box():
    """A new field is placed in `page/fields.py` or belongs to a group that is."""
    settings = [
        ("bert", {"position_type": "learned_relative_bias", "pruned_heads": {0: [1]}, "classifier_transform": True}),
        ("modernbert", {}),
        ("albert", {"task_type_vocab_size": 2}),
        ("qwen3", {"linear_bits": 4}),
        ("gpt_oss", {}),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}),
        ("ministral3", {}),
        ("esm", {"frequency_dtype": "float16"}),
        ("gemma4_text", {"num_hidden_layers": 12, "intermediate_sizes": [*[64] * 8, *[128] * 4]}),
        ("opt", {"token_embedding_size": 48}),
        ("llama", {"final_projection_size": 48}),
        ("t5gemma", {"merged_attention": True, "centered_window": True}),
        ("t5gemma", {"scales_in_embedding": True, "unscaled_token_id": 5}),
        ("gpt2", ALL),
    ]
    named = set()
    for name, overrides in settings:
        for architecture in (None, "BlockformerEncoderForSequenceClassification", "BlockformerEncoderForMaskedLM"):
            config = blockformer.preset(name, **overrides)
            if architecture and config.is_decoder | config.is_encoder_decoder:
                continue
            config.architectures = [architecture] if architecture else None
            facts = Facts(config, 4)
            named |= {field for box in facts.parts.boxes() for field in fields_of(box, config)}
    classes = {type(blockformer.preset(name)) for name, _ in settings}
    described = {field for cls in classes for field, axis in axes(cls).items() if axis.group in SHOWN}
    described.add("dynamic_tanh_alpha")
    assert described <= named, sorted(described - named)


def test_differences_are_of_building_and_sizes_are_apart():
    bert, base = Facts(blockformer.preset("bert"), 4), Facts(blockformer.preset("bert-large"), 4)
    told = differences(base, bert, "bert")
    assert (told["boxes"], told["missing"]) == ({}, [])
    assert ["hidden_size", "1,024", "768"] in told["sizes"]

    told = differences(Facts(blockformer.preset("qwen3-0.6b"), 4), bert, "bert")
    attention = told["boxes"]["model.layers.0.self_attn"]
    assert "position_type is rotary, in bert learned." in attention
    assert "A token looks back only, in bert both ways." in attention
    assert any("share key/value heads" in line for line in attention)
    assert told["boxes"]["model.layers.0.self_attn_pre_norm"] == ["bert has none here."]
    assert any(line.startswith("gated_mlp is True") for line in told["boxes"]["model.layers.0.mlp"])
    assert any(title.startswith("Learned positions") for title in told["missing"])
    assert any("after the sum of self-attention" in title for title in told["missing"])

    told = differences(
        Facts(blockformer.preset("gemma3_text"), 4), Facts(blockformer.preset("gemma3_text"), 4), "itself"
    )
    assert (told["boxes"], told["missing"], told["sizes"]) == ({}, [], [])

    told = differences(Facts(blockformer.preset("modernbert"), 4), bert, "bert")
    first, sliding = (told["boxes"][f"layers.{layer}.self_attn"] for layer in (0, 1))
    assert set(sliding) - set(first) == {"A token looks both ways in a window, in bert both ways."}


def test_a_model_whose_layers_are_all_different_has_a_page_of_bounded_size():
    config = blockformer.preset("gpt2", num_hidden_layers=60, num_attention_heads=64, head_dim=12, pruned_heads={
        layer: list(range(layer + 1)) for layer in range(60)
    })  # fmt: skip
    html = page(Facts(config, 4), "pruned")
    assert len(html.encode()) < MAX_BYTES
    assert "There are 60 kinds of layers; the first 24 are shown." in html


def test_numbers_for_people():
    assert [short(count) for count in (0, 999, 1234567, 5.1e9)] == ["0", "999", "1.23 M", "5.1 G"]
    assert spans((0, 1, 2, 5)) == "layers 0-2, 5"
    assert spans((3,)) == "layer 3"
