"""The kernels of `fla` for the gated delta rule, which no CPU runs: stand-ins that compute its definition."""

import copy
import sys
import types

import pytest
import torch
from pairs import left_padded, token_ids
from sizes import STRONG

import blockformer
from blockformer.engine import attention
from blockformer.model.delta_rule import delta_rule_by_chunk, delta_rule_by_token

STATES = {
    "vocab_size": 199,
    "num_hidden_layers": 3,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


class StandIns:
    """`fla`'s two functions, of its layout and of its signature, and what they were called with."""

    def __init__(self):
        self.calls = []

    def chunk_gated_delta_rule(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        return self._run("chunk", delta_rule_by_chunk, q, k, v, g, beta, scale, initial_state, output_final_state)

    def fused_recurrent_gated_delta_rule(
        self, q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False
    ):
        return self._run("one", delta_rule_by_token, q, k, v, g, beta, scale, initial_state, output_final_state)

    def _run(self, name, rule, q, k, v, g, beta, scale, state, keeps):
        self.calls.append((name, q.shape[1], q.dtype))
        assert q.dtype is k.dtype is v.dtype
        assert (keeps, scale, {g.dtype, beta.dtype, state.dtype}) == (True, 1.0, {torch.float32})
        wide = [each.float().transpose(1, 2) for each in (q, k, v, g, beta)]
        output, state = rule(*wide, state.clone())
        return output.transpose(1, 2).to(q.dtype), state


@pytest.fixture
def fla(monkeypatch):
    """Stand-ins in the place of the package, for tensors on a CPU."""
    stand_ins = StandIns()
    monkeypatch.setattr(attention, "RULE_DEVICES", ("cpu",))
    found = (stand_ins.chunk_gated_delta_rule, stand_ins.fused_recurrent_gated_delta_rule)
    monkeypatch.setattr(attention, "rule_kernels", lambda: found)
    return stand_ins


def model(dtype=torch.bfloat16, **more):
    torch.manual_seed(0)
    config = blockformer.BlockformerDecoderConfig(**{**STRONG, **STATES, **more})
    return blockformer.BlockformerDecoderForCausalLM(config).to(dtype).eval()


def without(monkeypatch, run):
    """What a run gives without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "rule_kernels", lambda: None)
        return run()


@torch.no_grad()
@pytest.mark.parametrize("prepares", [False, True])
def test_prompts_and_tokens_are_those_of_the_layer(fla, monkeypatch, prepares):
    """Padding on the left included; float64 is the judge of what 16 bits may differ by."""
    ours = model()
    ids, mask = left_padded(3, 80)
    exact = copy.deepcopy(ours).double()
    ours = ours.prepare_for_inference() if prepares else ours
    wanted = exact(ids, attention_mask=mask).logits[mask.bool()]
    plain = without(monkeypatch, lambda: ours(ids, attention_mask=mask).logits[mask.bool()])
    found = ours(ids, attention_mask=mask).logits[mask.bool()]
    assert fla.calls == [("chunk", 80, torch.bfloat16)] * 2
    assert (found.double() - wanted).abs().mean() < 1.5 * (plain.double() - wanted).abs().mean()
    fla.calls.clear()
    cache = ours(ids[:, :79], attention_mask=mask[:, :79], use_cache=True).past_key_values
    last = ours(ids[:, 79:], attention_mask=mask, past_key_values=cache).logits[:, 0].double()
    assert [name for name, _, _ in fla.calls] == ["chunk", "chunk", "one", "one"]
    limit = 1.5 * (plain.double() - wanted).abs().max()
    assert (last - exact(ids, attention_mask=mask).logits[:, -1]).abs().max() < limit
    text = ours.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=2, do_sample=False)
    assert text.shape[1] <= 85


def test_training_gets_gradients_as_near_to_the_exact_ones(fla, monkeypatch):
    ours, ids = model().train(), token_ids(2, 70)

    def gradients(a_model):
        a_model.zero_grad()
        a_model(ids, labels=ids).loss.backward()
        return torch.cat([each.grad.flatten().float() for each in a_model.parameters()])

    exact = gradients(copy.deepcopy(ours).float())
    plain, found = without(monkeypatch, lambda: gradients(ours)), gradients(ours)
    assert len(fla.calls) == 2
    assert not torch.equal(plain, found)
    assert (found - exact).norm() < 1.5 * (plain - exact).norm()


@torch.no_grad()
def test_hooks_see_what_they_see_without_kernels(fla, monkeypatch):
    ours, ids = model(), token_ids(2, 70)

    def seen():
        tensors = []
        for name, module in ours.named_modules():
            hooks = module.register_forward_hook(
                lambda _, given, output, name=name: tensors.append((name, [*given, output]))
            )
            handles.append(hooks)
        ours(ids)
        while handles:
            handles.pop().remove()
        return [(name, [t for t in held if isinstance(t, torch.Tensor)]) for name, held in tensors]

    handles: list = []
    plain, found = without(monkeypatch, seen), seen()
    assert len(fla.calls) == 2
    assert [name for name, _ in found] == [name for name, _ in plain]
    for (name, theirs), (_, own) in zip(plain, found, strict=True):
        assert [(t.shape, t.dtype) for t in own] == [(t.shape, t.dtype) for t in theirs], name
    before = next(held for name, held in found if name.endswith("layers.0.self_attn.in_proj_v"))
    assert torch.equal(before[-1], next(h for n, h in plain if n.endswith("layers.0.self_attn.in_proj_v"))[-1])


@pytest.mark.parametrize(
    ("dtype", "more", "given"),
    [
        (torch.float32, {}, {}),
        (torch.float64, {}, {}),
        (torch.bfloat16, {"linear_key_head_dim": 264}, {}),
        (torch.bfloat16, {}, {"position_ids": torch.tensor([[*range(30), *range(40)]] * 2), "use_cache": False}),
    ],
    ids=["float32", "float64", "wide keys", "texts in a row"],
)
@torch.no_grad()
def test_what_kernels_do_not_serve_is_exact_without_them(fla, monkeypatch, dtype, more, given):
    ours, ids = model(dtype, **more), token_ids(2, 70)
    plain = without(monkeypatch, lambda: ours(ids, **given).logits)
    assert torch.equal(ours(ids, **given).logits, plain)
    assert not fla.calls


def test_a_token_that_learns_and_a_traced_graph_go_without(fla, monkeypatch):
    ours = model()
    ours(token_ids(2, 1)).logits.sum().backward()
    torch.export.export(ours.eval(), (token_ids(2, 9),), {"use_cache": False}, strict=False)
    with torch.no_grad():
        monkeypatch.setenv("BLOCKFORMER_FAST", "0")
        ours(token_ids(2, 70))
    assert not fla.calls


def test_a_package_that_is_missing_or_broken_is_left_out(monkeypatch, caplog):
    attention.rule_kernels.cache_clear()
    assert attention.rule_kernels() is None  # no GPU here, or no such package
    monkeypatch.setattr(attention, "is_flash_linear_attention_available", lambda: True)
    stand_ins = StandIns()
    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = stand_ins.chunk_gated_delta_rule
    module.fused_recurrent_gated_delta_rule = stand_ins.fused_recurrent_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    attention.rule_kernels.cache_clear()
    assert attention.rule_kernels() == (module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule)
    del module.chunk_gated_delta_rule
    attention.rule_kernels.cache_clear()
    assert attention.rule_kernels() is None
    assert "fla is installed and cannot be imported" in caplog.text
    attention.rule_kernels.cache_clear()
