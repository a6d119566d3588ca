"""The figure of a model says of every preset what its modules are."""

import re
from xml.etree import ElementTree

import pytest

import blockformer
from blockformer.pictures import anatomy, figure
from blockformer.summary import on_paper

SVG = "{http://www.w3.org/2000/svg}"


SIZE_IN_A_NAME = re.compile(r"-(base|large|big|medium|small|xl|[\d.]+b)$")  # of a family that has a preset of its own
NAMES = [
    name for name in sorted(blockformer.preset()) if not SIZE_IN_A_NAME.search(name) or name.startswith("transformer")
]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in NAMES), ("opt", {"token_embedding_size": 48})])
def test_every_module_with_weights_is_in_a_box_and_every_box_is_drawn(name, settings):
    model = on_paper(blockformer.preset(name, **settings))
    parts = anatomy(model)
    inside = tuple(f"{box.path}." for box in parts.boxes())
    alike = {}  # a layer that no box names -> the one of its kind that is opened
    for stack in parts.stacks:
        prefix = f"{stack.path}." if stack.path else ""
        for kind in stack.kinds:
            opened = f"{prefix}layers.{kind.layers[0] // stack.sharing}."
            alike |= {f"{prefix}layers.{layer // stack.sharing}.": opened for layer in kind.layers}
    for parameter, _ in model.named_parameters():
        for layer, opened in alike.items():
            if parameter.startswith(layer):
                parameter = opened + parameter.removeprefix(layer)
                break
        assert parameter.startswith(inside), parameter
    drawn = set()
    for opened in range(max(len(stack.kinds) for stack in parts.stacks)):
        tree = ElementTree.fromstring(figure(parts, opened))
        drawn |= {group.get("data-path") for group in tree.iter(f"{SVG}g") if group.get("class") == "box"}
    assert drawn == {box.path for box in parts.boxes()}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("bert", {}, ["Segments", "Learned", "Layer norm", "12 heads of 64", "Pooler"]),
        ("qwen3-0.6b", {}, ["16 heads of 128, 8 key/value heads", "q/k norm", "rotary", "tied to the embedding"]),
        ("t5", {}, ["Relative", "scores", "Cross-attention", "source tokens", "target tokens"]),
        ("gemma3_text", {}, ["window of 512 tokens", "window 512", "RMS norm, 1 + weight"]),
        ("mixtral", {}, ["Experts", "2 of 8 experts, each 1,536 wide"]),
        ("gpt_oss", {}, ["sinks", "rotary, yarn"]),
        ("bloom", {}, ["ALiBi", "slope by distance"]),
        ("deberta-v2", {}, ["Distance", "content · distance"]),
        ("albert", {}, ["shared", "Projection", "128 → 768"]),
        ("opt", {"token_embedding_size": 48}, ["Projection", "48 → 512", "512 → 48"]),
        ("smollm3", {}, ["no positions"]),
        ("granite", {}, ["\N{MULTIPLICATION SIGN} 0.22"]),
        ("gpt_neox", {}, ["rotary on 25%"]),
        ("qwen3", {"position_type": "none"}, ["no positions"]),
        ("qwen3", {"position_type": "relative_key_query"}, ["relative keys and queries"]),
    ],
)
def test_the_figure_says_what_is_special(name, settings, words):
    parts = anatomy(on_paper(blockformer.preset(name, **settings)))
    kinds = max(len(stack.kinds) for stack in parts.stacks)
    texts = {
        text.text
        for opened in range(kinds)
        for text in ElementTree.fromstring(figure(parts, opened)).iter(f"{SVG}text")
    }
    assert set(words) <= texts, set(words) - texts


def test_layers_of_each_kind_are_those_of_the_config():
    config = blockformer.preset("modernbert")
    parts = anatomy(on_paper(blockformer.preset("modernbert")))
    kinds = {kind.title: kind.layers for kind in parts.stacks[0].kinds}
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert kinds == {
        "full attention, no first norm": (0,),
        "full attention": tuple(full[1:]),
        "window of 64 tokens": tuple(layer for layer in range(config.num_hidden_layers) if layer not in full),
    }
