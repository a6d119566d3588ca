import pytest
import torch

from blockformer.conversion import ConversionError
from blockformer.conversion.rules.in_turn import InTurn, in_turn
from blockformer.conversion.rules.operations import Chain, Identity, Split, Transpose
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.conversion.storage.experts import OneByOne
from blockformer.conversion.storage.spelling import Ending, Prefix

FUSED = RuleTable([Rule("file.qkv", ("class.q", "class.k", "class.v"), Split(0, (2, 3, 4)))])
ONE_EACH = RuleTable(
    [Rule("class.q", "ours.q", Transpose()), Rule("class.k", "ours.k"), Rule("class.v", "ours.v"), Rule("b", "ours.b")]
)


def both(first, second, tensors, reverse=False, rest=True, **options):
    before = first.plan(tensors, reverse=reverse, rest=rest)
    between = {target.name: target for group in before for target in group.targets}
    return in_turn(before, second.plan(between, reverse=reverse, **options))


def test_what_the_first_splits_several_groups_of_the_second_share():
    tensors = {"file.qkv": torch.randn(9, 5), "b": torch.randn(3)}
    groups = both(FUSED, ONE_EACH, tensors)
    assert [group.sources for group in groups] == [("file.qkv",), ("b",)]  # read once
    made = {name: tensor for group in groups for name, tensor in group.apply(tensors.__getitem__)}
    q, k, v = tensors["file.qkv"].split((2, 3, 4))
    wanted = {"ours.q": q.t(), "ours.k": k, "ours.v": v, "ours.b": tensors["b"]}
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in made)


def test_and_back():
    ours = {"ours.q": torch.randn(5, 2), "ours.k": torch.randn(3, 5), "ours.v": torch.randn(4, 5)}
    to_class = ONE_EACH.plan(ours, reverse=True)
    between = {target.name: target for group in to_class for target in group.targets}
    (group,) = in_turn(to_class, FUSED.plan(between, reverse=True, rest=True))
    ((name, tensor),) = group.apply(ours.__getitem__)
    assert name == "file.qkv"
    assert torch.equal(tensor, torch.cat((ours["ours.q"].t(), ours["ours.k"], ours["ours.v"])))


def test_a_step_that_only_renames_costs_nothing():
    tensors = {"a": torch.randn(2, 3)}
    (plain,) = both(RuleTable([Rule("a", "b")]), RuleTable([Rule("b", "c")]), tensors)
    assert plain.is_copy
    assert (plain.sources, plain.targets[0].name) == (("a",), "c")
    (swapped,) = both(RuleTable([Rule("a", "b", Transpose())]), RuleTable([Rule("b", "c")]), tensors)
    assert swapped.op == Transpose()
    assert swapped.targets[0].shape == (3, 2)


def test_a_step_that_undoes_the_one_before_is_left_out():
    swap_and_more = Chain(Transpose(), Split(0, (1, 2)))
    tensors = {"a": torch.randn(3, 2)}
    second = RuleTable([Rule("b", ("c", "d"), swap_and_more)])
    (group,) = both(RuleTable([Rule("a", "b", Transpose())]), second, tensors)
    assert group.op == Split(0, (1, 2))
    (same,) = both(RuleTable([Rule("a", "b", Transpose())]), RuleTable([Rule("b", "c", Transpose())]), tensors)
    assert isinstance(same.op, Identity)
    assert torch.equal(same.apply(tensors.__getitem__)[0][1], tensors["a"])


def test_the_dtype_of_the_second_step_counts():
    tensors = {"file.qkv": torch.randn(9, 5)}
    (group,) = both(FUSED, ONE_EACH, tensors, dtype=torch.bfloat16)
    assert isinstance(group.op, InTurn)
    assert {tensor.dtype for _, tensor in group.apply(tensors.__getitem__)} == {torch.bfloat16}
    assert {target.dtype for target in group.targets} == {torch.bfloat16}


def test_the_rest_keeps_its_place_and_any_dtype():
    tensors = {"x": torch.zeros(1, dtype=torch.int64), "file.qkv": torch.zeros(9, 1), "y": torch.zeros(2)}
    groups = FUSED.plan(tensors, rest=True)
    assert [group.targets[0].name for group in groups] == ["x", "class.q", "y"]
    assert RuleTable([]).plan(tensors, rest=True)[0].targets[0].dtype is torch.int64


def test_the_rest_must_not_have_a_name_that_is_made():
    with pytest.raises(ConversionError, match=r"targets filled twice \(1\):\n  'class.q'"):
        FUSED.plan({"file.qkv": torch.zeros(9, 1), "class.q": torch.zeros(2, 1)}, rest=True)


def test_shapes_before_are_those_of_the_sources():
    shapes = ONE_EACH.shapes_before({"ours.q": (5, 2), "ours.k": (3, 5), "other": (1,)})
    assert shapes == {"class.q": (2, 5), "class.k": (3, 5)}
    assert FUSED.shapes_before({"class.q": (2, 5), "class.k": (3, 5)}) == {}


@pytest.mark.parametrize(
    ("spelling", "in_file", "in_class"),
    [
        (Prefix("model.", "", ("layers.",)), "model.layers.0.x", "layers.0.x"),
        (Prefix("", "model.", ("layers.",)), "layers.0.x", "model.layers.0.x"),
        (Prefix("new.", "gte.", ("layers.",)), "new.layers.0.x", "gte.layers.0.x"),
        (Prefix("", "model.", ("layers.",)), "lm_head.weight", "lm_head.weight"),
        (Ending({"LayerNorm.gamma": "LayerNorm.weight"}), "a.LayerNorm.gamma", "a.LayerNorm.weight"),
        (Ending({"LayerNorm.gamma": "LayerNorm.weight"}), "a.dense.weight", "a.dense.weight"),
    ],
)
def test_a_spelling_and_back(spelling, in_file, in_class):
    assert spelling.to_class(in_file) == in_class
    assert spelling.to_file(in_class) == in_file


def test_experts_one_by_one_become_those_of_the_class():
    table = RuleTable(OneByOne("moe.", ("w1", "w3", "w2")).rules("l.{layer}.", ["gate"], ["bias"], experts=2))
    parts = {f"l.0.moe.experts.{i}.{part}.weight": torch.randn(3, 4) for i in range(2) for part in ("w1", "w3")}
    parts |= {f"l.0.moe.experts.{i}.w2.weight": torch.randn(4, 3) for i in range(2)}
    tensors = {**parts, "l.0.moe.gate.weight": torch.randn(2, 4), "l.0.moe.bias": torch.randn(2)}
    groups = table.plan(tensors, rest=True)
    made = {name: tensor for group in groups for name, tensor in group.apply(tensors.__getitem__)}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "l.0.mlp.experts.gate_up_proj": (2, 6, 4),
        "l.0.mlp.experts.down_proj": (2, 4, 3),
        "l.0.mlp.gate.weight": (2, 4),
        "l.0.mlp.bias": (2,),
    }
    again = {name: t for g in table.plan(made, reverse=True, rest=True) for name, t in g.apply(made.__getitem__)}
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
