"""The mapping engine: rules, plans in both directions, and everything that it refuses."""

import random
import time
from typing import Any

import pytest
import torch
from checkpoint_files import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from blockformer.conversion.rules.groups import Group
from blockformer.conversion.rules.operations import Chain, Identity, Reversed, Reversible, Split, Transpose
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.conversion.rules.ties import check_tied
from blockformer.files.errors import ConversionError
from blockformer.files.safetensors_io import DTYPES

TABLE = RuleTable(
    [
        Rule("wte.weight", "embed.weight"),
        Rule("h.{layer}.up.weight", "layers.{layer}.up.weight", Transpose()),
        Rule(
            "h.{layer}.attn.weight",
            ("layers.{layer}.q.weight", "layers.{layer}.k.weight"),
            Chain(Transpose(), Split(0, (4, 2))),
        ),
        Rule(("h.{layer}.a", "h.{layer}.b"), "layers.{layer}.ab", Reversed(Split(0, (2, 3)))),
        Rule("ids", "position_ids", dtypes=(torch.int64,)),
    ],
    ignored=["h.{layer}.attn.mask"],
)


def official(layers: int = 2) -> dict[str, torch.Tensor]:
    tensors = {"wte.weight": torch.randn(7, 3).bfloat16(), "ids": torch.arange(5)}
    for n in range(layers):
        tensors[f"h.{n}.up.weight"] = torch.randn(3, 8)
        tensors[f"h.{n}.attn.weight"] = torch.randn(3, 6)
        tensors[f"h.{n}.b"] = torch.randn(3)
        tensors[f"h.{n}.a"] = torch.randn(2)
    return tensors


def run(plan: list[Group], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = [pair for group in plan for pair in group.apply(tensors.__getitem__)]
    headers = [(t.name, t.dtype, t.shape) for group in plan for t in group.targets]
    assert headers == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]
    assert len(dict(made)) == len(made)
    return dict(made)


def problems(*args: Any, table: RuleTable = TABLE, **kwargs: Any) -> str:
    with pytest.raises(ConversionError) as caught:
        table.plan(*args, **kwargs)
    return str(caught.value)


def test_forward() -> None:
    tensors = official()
    ours = run(TABLE.plan(tensors), tensors)
    assert torch.equal(ours["embed.weight"], tensors["wte.weight"])
    assert torch.equal(ours["layers.1.up.weight"], tensors["h.1.up.weight"].t())
    assert torch.equal(ours["layers.0.q.weight"], tensors["h.0.attn.weight"].t()[:4])
    assert torch.equal(ours["layers.0.k.weight"], tensors["h.0.attn.weight"].t()[4:])
    assert torch.equal(ours["layers.0.ab"], torch.cat([tensors["h.0.a"], tensors["h.0.b"]]))
    assert len(ours) == 2 + 2 * 4


def test_there_and_back_is_the_identity() -> None:
    tensors = official()
    ours = run(TABLE.plan(tensors, {name: t.shape for name, t in run(TABLE.plan(tensors), tensors).items()}), tensors)
    back = run(TABLE.plan(ours, {name: t.shape for name, t in tensors.items()}, reverse=True), ours)
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def test_plan_reads_nothing_and_keeps_the_order() -> None:
    tensors = {name: t.to("meta") for name, t in official().items()}
    plan = TABLE.plan(tensors)
    assert [group.sources[0] for group in plan][:4] == ["wte.weight", "ids", "h.0.up.weight", "h.0.attn.weight"]
    assert next(group for group in plan if "h.0.b" in group.sources).sources == ("h.0.a", "h.0.b")


def test_cast_of_floating_point_tensors_only() -> None:
    tensors = official()
    made = run(TABLE.plan(tensors, dtype=torch.float16), tensors)
    assert made.pop("position_ids").dtype == torch.int64
    assert {tensor.dtype for tensor in made.values()} == {torch.float16}
    assert torch.equal(made["embed.weight"], tensors["wte.weight"].half())


# --- refusals -------------------------------------------------------------------------------------------------------


def test_key_that_no_rule_takes() -> None:
    message = problems({**official(), "h.0.extra": torch.zeros(1), "bias": torch.zeros(1)})
    assert "tensors that no rule takes (2)" in message
    assert "'h.0.extra'" in message
    assert "'bias'" in message


def test_ignored_keys_are_dropped_on_the_way_in_only() -> None:
    tensors = official()
    assert (
        run(TABLE.plan({**tensors, "h.0.attn.mask": torch.zeros(1)}), tensors).keys()
        == run(TABLE.plan(tensors), tensors).keys()
    )
    ours = {**run(TABLE.plan(tensors), tensors), "h.0.attn.mask": torch.zeros(1)}
    assert "'h.0.attn.mask'" in problems(ours, reverse=True)


def test_two_rules_for_one_key() -> None:
    table = RuleTable([Rule("a.{layer}", "b.{layer}"), Rule("a.0", "c"), Rule("x", "y")])
    message = problems({"a.0": torch.zeros(1), "x": torch.zeros(1)}, table=table)
    assert "several rules take (1)" in message
    assert "'a.0': a.{layer}, a.0" in message


def test_target_filled_twice() -> None:
    table = RuleTable([Rule("gamma", "weight"), Rule("scale", "weight")])
    message = problems({"gamma": torch.zeros(1), "scale": torch.zeros(1)}, table=table)
    assert "targets filled twice (1)" in message
    assert "'weight': from 'gamma' and 'scale'" in message


def test_missing_part_of_a_group() -> None:
    tensors = official()
    del tensors["h.1.a"]
    assert "'h.1.b': needs 'h.1.a'" in problems(tensors)


def test_everything_wrong_is_in_one_error() -> None:
    tensors = official()
    expected = {name: t.shape for name, t in run(TABLE.plan(tensors), tensors).items()}
    expected["embed.weight"] = torch.Size([3, 7])
    expected["norm.weight"] = torch.Size([3])
    del expected["layers.1.up.weight"]
    tensors["h.0.attn.weight"] = torch.zeros(3, 7)
    tensors["h.0.up.weight"] = torch.zeros(3, 8, dtype=torch.int32)
    tensors["h.0.a"] = torch.zeros(2, dtype=torch.float16)
    tensors["h.0.what"] = torch.zeros(1)
    message = problems(tensors, expected)
    for part in (
        "'h.0.what'",
        "'embed.weight' is [7, 3], the model's is [3, 7]",
        "nothing fills (1):\n  'norm.weight'",
        "'layers.1.up.weight' (from 'h.1.up.weight')",
        "'h.0.attn.weight': shape [7, 3] cannot be split into [4, 2]",
        "'h.0.up.weight' is torch.int32",
        "'h.0.a' torch.float16, 'h.0.b' torch.float32",
    ):
        assert part in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64])
def test_integer_where_a_float_belongs(dtype: torch.dtype) -> None:
    assert f"'wte.weight' is {dtype}" in problems({**official(), "wte.weight": torch.zeros(7, 3).to(dtype)})


def test_a_layer_too_few_and_one_too_many() -> None:
    tensors = official()
    expected = {name: t.shape for name, t in run(TABLE.plan(tensors), tensors).items()}
    assert "nothing fills (4)" in problems(official(1), expected)
    assert "no place for (4)" in problems(official(3), expected)


def test_optional_targets_may_stay_unfilled() -> None:
    tensors = official()
    expected = {name: t.shape for name, t in run(TABLE.plan(tensors), tensors).items()}
    expected.update({"lm_head.weight": torch.Size([7, 3]), "layers.5.tied": torch.Size([1])})
    assert "'lm_head.weight'" in problems(tensors, expected)
    assert TABLE.plan(tensors, expected, optional=["lm_head.weight", "layers.{layer}.tied"])


def test_long_lists_are_cut() -> None:
    message = problems({**official(), **{f"x{i}": torch.zeros(1) for i in range(1000)}})
    assert "(1000)" in message
    assert "and 980 more" in message
    assert message.count("\n") < 30


def test_no_key_matches() -> None:
    tensors = official()
    inner = RuleTable(
        [
            Rule("model." + r.source, "m." + r.target)
            for r in TABLE.rules
            if isinstance(r.source, str) and isinstance(r.target, str)
        ]
    )
    assert "they match without the prefix 'a.b.'" in problems({f"a.b.{name}": t for name, t in tensors.items()})
    assert "they match with the prefix 'model.'" in problems(tensors, table=inner)
    assert "another family" in problems({"bert.what": torch.zeros(1)})
    assert "another family" in problems({"h.0.attn.mask": torch.zeros(1)})  # ignored alone is nothing
    assert "no tensors" in problems({})


HOSTILE = ["h.+.up.weight", "h.00.up.weight", "h.01.up.weight", "h.-1.up.weight", "h.1.up.weight\n", "H.1.up.weight",
           "h.{layer}.up.weight", "h.\u0661.up.weight", "h.1\u0661.up.weight",
           "hx1xupxweight", "h.1.up.weight.x", "xh.1.up.weight",
           "h..up.weight", "h.9999999999.up.weight", "../h.1.up", "(a+)+$", "\\", "[", "%s", "\0", ""]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_match_nothing(name: str) -> None:
    assert f"no rule takes (1):\n  {name!r}" in problems({"wte.weight": torch.zeros(1), name: torch.zeros(1)})


def test_patterns_are_no_regular_expressions() -> None:
    table = RuleTable([Rule("a.*(b|c)[{layer}]+$", r"\1.{layer}.*")])
    (group,) = table.plan({"a.*(b|c)[12]+$": torch.zeros(1)})
    assert group.targets[0].name == r"\1.12.*"
    assert "no tensor name matches" in problems({"a.xb12": torch.zeros(1)}, table=table)


def test_many_and_long_names_take_no_long_time() -> None:
    tensors: dict[str, torch.Tensor] = {f"h.{'9' * i}": torch.zeros(1) for i in range(2000)}
    tensors.update({f"h.{i}.attn.weight.": torch.zeros(1) for i in range(50_000)})
    began = time.process_time()
    problems({**official(), **tensors})
    problems(tensors)
    assert time.process_time() - began < 10


def test_two_placeholders_and_one_that_is_repeated() -> None:
    table = RuleTable([Rule("l.{layer}.e.{expert}.w", "{expert}.{layer}.{layer}")])
    (group,) = table.plan({"l.3.e.12.w": torch.zeros(1)})
    assert group.targets[0].name == "12.3.3"
    (group,) = table.plan({"12.3.3": torch.zeros(1)}, reverse=True)
    assert group.targets[0].name == "l.3.e.12.w"
    assert "no tensor name matches" in problems({"12.3.4": torch.zeros(1)}, table=table, reverse=True)


def test_rule_with_other_placeholders_on_each_side() -> None:
    with pytest.raises(ValueError, match="same placeholders"):
        RuleTable([Rule("a.{layer}", "b")])
    with pytest.raises(ValueError, match="same placeholders"):
        RuleTable([Rule(("a.{layer}", "c"), "b.{layer}", Reversed(Split(0, (1, 1))))])


def test_operation_that_makes_another_number_of_tensors() -> None:
    table = RuleTable([Rule("a", ("b", "c"), Split(0, (1, 1, 1)))])
    assert "wrong shapes" in problems({"a": torch.zeros(3)}, table=table)
    table = RuleTable([Rule(("a", "b"), ("c", "d", "e"), Split(0, (1, 1, 1)))])
    assert "wrong shapes" in problems({"a": torch.zeros(3), "b": torch.zeros(3)}, table=table)
    table = RuleTable([Rule(("a", "b"), "c", Reversed(Split(0, (1, 1))))])
    assert "wrong shapes" in problems({"a": torch.zeros(1, 2), "b": torch.zeros(1, 3)}, table=table)
    assert "wrong shapes" in problems({"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, table=table)


@pytest.mark.parametrize("shape", [(7, 3), (2, 3), ()])
def test_what_has_not_these_parts(shape: tuple[int, ...]) -> None:
    table = RuleTable([Rule("a", ("b", "c", "d"), Split(0, (2, 2, 2)))])
    message = problems({"a": torch.zeros(shape)}, table=table)
    assert f"'a': shape {list(shape)} cannot be split into [2, 2, 2] along axis 0" in message


@pytest.mark.parametrize("odd", [(3, 3), (2, 4), (2,), ()])
def test_parts_of_other_sizes(odd: tuple[int, ...]) -> None:
    table = RuleTable([Rule("a", ("b", "c"), Split(0, (2, 2)))])
    for shapes in ([(2, 3), odd], [odd, (2, 3)], *([[(), ()]] if not odd else [])):
        parts = dict(zip("bc", map(torch.zeros, shapes), strict=True))
        assert "are not parts of sizes [2, 2] along axis 0" in problems(parts, table=table, reverse=True)


def test_parts_share_no_memory() -> None:
    for width in (4, 6, 0):
        whole = torch.randn(5, 3 * width)
        parts = Chain(Split(1, (width,) * 3), Transpose()).forward([whole])
        assert [tuple(part.shape) for part in parts] == [(width, 5)] * 3
        assert all(torch.equal(part.t(), whole[:, i * width : (i + 1) * width]) for i, part in enumerate(parts))
    for op in (Split(0, (2, 2, 2)), Split(1, (1, 2, 3)), Chain(Transpose(), Split(0, (2, 2, 2)))):
        whole = torch.randn(6, 6)
        parts = op.forward([whole])
        before = [part.clone() for part in parts[1:]]
        assert all(part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes for part in parts)
        parts[0].zero_()
        assert all(map(torch.equal, parts[1:], before))
        assert whole.all()


def test_tensor_that_is_not_what_its_header_said() -> None:
    (group,) = RuleTable([Rule("a", "b")]).plan({"a": torch.zeros(2)})
    with pytest.raises(ConversionError, match=r"'b' is \[3\], not \[2\] as planned"):
        group.apply(lambda name: torch.zeros(3))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("op", [Split(1, (1, 3, 2)), Split(1, (2, 2, 2))], ids=["unequal", "equal"])
def test_operations_keep_every_bit_of_every_dtype(dtype: str, op: Reversible) -> None:
    bits = torch.randint(0, 2 if dtype == "BOOL" else 256, (6, 4 * DTYPES[dtype].itemsize), dtype=torch.uint8)
    tensor = bits.view(DTYPES[dtype])
    op = Chain(Transpose(), op, Reversed(Reversed(Identity())))
    parts = op.forward([tensor])
    assert [tuple(part.shape) for part in parts] == op.forward_shapes([(6, 4)])
    (back,) = op.inverse(parts)
    assert op.inverse_shapes([tuple(part.shape) for part in parts]) == [(6, 4)]
    assert same_bits(back, tensor)


@st.composite
def tables(draw: st.DrawFn) -> tuple[RuleTable, dict[str, torch.Tensor]]:
    """A random table, and official tensors that it takes."""
    rules, tensors = [], {}
    for index in range(draw(st.integers(1, 5))):
        layers = draw(st.integers(0, 3))
        tail = ".{layer}" if layers else ""
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        rest = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)))
        swap, equal = draw(st.booleans()), draw(st.booleans())
        sizes = sizes[:1] * len(sizes) if equal else sizes
        op: Reversible = Chain(*[Transpose()] * swap, Split(0, sizes))
        whole, parts = f"w{index}{tail}", tuple(f"p{index}.{i}{tail}" for i in range(len(sizes)))
        shape = (sum(sizes), *rest)
        if swap:
            shape = (shape[1], shape[0], *shape[2:])
        merge = draw(st.booleans())
        rules.append(Rule(parts, whole, Reversed(op)) if merge else Rule(whole, parts, op))
        for layer in range(max(layers, 1)):
            tensor = torch.randn(shape).to(dtype)
            made = zip(parts, op.forward([tensor]), strict=True) if merge else [(whole, tensor)]
            tensors.update({name.replace("{layer}", str(layer)): part for name, part in made})
    draw(st.randoms(use_true_random=False)).shuffle(rules)
    return RuleTable(rules), tensors


@settings(max_examples=60, deadline=None)
@given(case=tables(), seed=st.integers(0, 99))
def test_every_table_is_undone_by_its_reverse(case: tuple[RuleTable, dict[str, torch.Tensor]], seed: int) -> None:
    table, tensors = case
    names = list(tensors)
    random.Random(seed).shuffle(names)
    ours = run(table.plan({name: tensors[name] for name in names}), tensors)
    back = run(table.plan(ours, {name: t.shape for name, t in tensors.items()}, reverse=True), ours)
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


# --- tied tensors ---------------------------------------------------------------------------------------------------


def test_tied_tensors_must_be_equal_bit_for_bit() -> None:
    nan = torch.tensor([[1.0, float("nan")]])
    tensors = {
        "a": nan,
        "same": nan.clone().t().contiguous().t(),
        "value": torch.tensor([[1.0, 2.0]]),
        "zero": torch.tensor([0.0]),
        "minus": torch.tensor([-0.0]),
        "dtype": nan.double(),
        "shape": nan.t(),
        "kind": nan.view(torch.int32),
    }
    check_tied(tensors.__getitem__, [("a", "same")])
    check_tied(tensors.__getitem__, [])
    with pytest.raises(ConversionError, match="tie_word_embeddings") as caught:
        check_tied(
            tensors.__getitem__,
            [("a", "same"), ("a", "value"), ("zero", "minus"), ("a", "dtype"), ("a", "shape"), ("a", "kind")],
        )
    assert "'same'" not in str(caught.value)
    for name in ("value", "minus", "dtype", "shape", "kind"):
        assert f"and '{name}'" in str(caught.value)
