"""What `gpu.py` checks: every way of small models of every topology, compared with float64 on the CPU."""

from __future__ import annotations

import copy
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_models import DTYPES, LENGTH, ROWS, converted, inputs_of, official_models, project

# Times as far from float64 as transformers' class that ours may be.
MOST = 4


@dataclass(frozen=True)
class Check:
    """An answer: how far it is from float64, as a share of the largest value, ours and transformers'."""

    family: str
    way: str
    dtype: str
    ours: float
    theirs: float
    is_right: bool
    note: str = ""


@torch.no_grad()
def logits(model, device: str, **more) -> torch.Tensor:
    """Of the real tokens, on the CPU."""
    batch = inputs_of(model, device)
    found = model(**batch, **more).logits
    mask = None if "decoder_input_ids" in batch else batch["attention_mask"].bool()
    return (found if mask is None else found[mask]).double().cpu()


@torch.no_grad()
def exact_logits(peer) -> torch.Tensor:
    """The same by transformers' class in float64, row by row without padding: no mask has a part in it."""
    model, batch = copy.deepcopy(peer).double(), inputs_of(peer, "cpu")
    _one_expert_at_a_time(model)
    found = []
    for row in range(ROWS):
        real = batch["attention_mask"][row].bool()
        one = {"input_ids": batch["input_ids"][row : row + 1, real]}
        if "decoder_input_ids" in batch:
            one["decoder_input_ids"] = batch["decoder_input_ids"][row : row + 1]
        found.append(model(**one).logits[0])
    return torch.stack(found) if "decoder_input_ids" in batch else torch.cat(found)


def _one_expert_at_a_time(model) -> None:
    """PyTorch's matmul of all experts at once knows no float64."""
    if getattr(model.config, "num_local_experts", None):
        model.set_experts_implementation("eager")


def checks(device: str, name: str) -> Iterator[Check]:
    """Every way of a family in every dtype, compared with float64 and transformers' class."""
    skip_all_padding()
    torch.manual_seed(0)
    peer = official_models()[name]().eval()
    ours = converted(peer).eval()
    exact = exact_logits(peer)
    for label, dtype in DTYPES.items():
        theirs, plain = (copy.deepcopy(model).to(device, dtype) for model in (peer, ours))
        usual = error_of(logits(theirs, device), exact)
        for way, prepare in _ways(name, device).items():
            yield check(name, way, label, usual, lambda p=prepare, m=plain: error_of(logits(p(m), device), exact))
        yield check(name, "gradients", label, *_gradients(theirs, plain, device))
        if plain.can_generate():
            yield from _texts(name, label, usual, theirs, plain, device)


def _ways(name: str, device: str) -> dict[str, Callable]:
    ways = {
        "as loaded": lambda model: model,
        "prepared": lambda model: copy.deepcopy(model).prepare_for_inference(),
    }
    if name in ("gemma2", "gpt_oss") and device != "cpu":  # caps or sinks, without a matrix of all scores

        def flexible(model):
            model = copy.deepcopy(model)
            model.set_attn_implementation("flex_attention")
            return model

        ways["flex attention"] = flexible

        def long(model):
            from blockformer.engine import attention

            attention._MANY_SCORES = 0.9 * LENGTH**2  # this prompt takes the way of long ones, a step does not
            return copy.deepcopy(model).prepare_for_inference()

        ways["prepared, as a long context"] = long
    return ways


def skip_all_padding() -> None:
    """Of small batches, too, for which it does not pay."""
    project()
    from blockformer.engine import runtime

    runtime._LEAST_WORK = runtime._LEAST_WORK_OF_FLOAT32 = runtime._LEAST_SHARE = 0


def check(family: str, way: str, dtype: str, usual: float, ours: Callable[[], float | tuple[float, float]]) -> Check:
    """What `ours` finds, an error included, next to what transformers' class has there."""
    try:
        error = ours()
        if isinstance(error, tuple):
            error, own = error
            usual = max(usual, own)
    except Exception as problem:  # whatever a way raises here is what is to be known
        traceback.print_exc()
        note = "".join(traceback.format_exception_only(problem)).strip().splitlines()[-1][:300]
        return Check(family, way, dtype, float("nan"), usual, False, note)
    if not math.isfinite(usual):
        return Check(family, way, dtype, error, usual, True, "transformers' own is not finite")
    return Check(family, way, dtype, error, usual, error <= MOST * usual + 1e-6)


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


def _gradients(theirs, ours, device: str) -> tuple[float, Callable[[], float]]:
    """How far the loss of a batch without padding, and the gradient of its embeddings, are from float64's."""

    def found(model, place: str, dtype=None) -> torch.Tensor:
        model = copy.deepcopy(model).to(place, dtype)
        batch = {key: value for key, value in inputs_of(model, place).items() if key.endswith("input_ids")}
        labels = batch["decoder_input_ids"] if "decoder_input_ids" in batch else batch["input_ids"]
        if dtype == torch.float64:
            _one_expert_at_a_time(model)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        gradient = model.get_input_embeddings().weight.grad.double().flatten().cpu()
        return torch.cat([loss.detach().double().cpu()[None], gradient])

    exact = found(theirs, "cpu", torch.float64)
    return error_of(found(theirs, device), exact), lambda: error_of(found(ours, device), exact)


def _texts(name: str, dtype: str, usual: float, theirs, plain, device: str) -> Iterator[Check]:
    """Greedy text: transformers judges it, since in 16 bits a rounding may choose another token."""
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ways = {"generate": lambda: plain, "generate, prepared": lambda: copy.deepcopy(plain).prepare_for_inference()}
    if device != "cpu":
        ways["generate, compiled"] = lambda: copy.deepcopy(plain).prepare_for_inference(compile=True)
    batch = {key: value for key, value in inputs_of(plain, device).items() if key in ("input_ids", "attention_mask")}
    expected = theirs.generate(**batch, **asked)
    for way, make in ways.items():

        def differing(make=make) -> float:
            found = make().generate(**batch, **asked)
            return 0.0 if found.shape == expected.shape and torch.equal(found, expected) else _surprise(found)

        def _surprise(found) -> float:
            """By how much transformers prefers its own text's tokens, as a share of the largest logit."""
            if plain.config.is_encoder_decoder:
                scores = theirs(**batch, decoder_input_ids=found).logits[:, :-1]
                chosen = found[:, 1:]
            else:
                mask = torch.cat([batch["attention_mask"], torch.ones_like(found[:, LENGTH:])], 1)
                places = (mask.cumsum(-1) - 1).clamp(min=0)
                scores = theirs(input_ids=found, attention_mask=mask, position_ids=places).logits[:, LENGTH - 1 : -1]
                chosen = found[:, LENGTH:]
            lost = scores.amax(-1) - scores.gather(-1, chosen[..., None])[..., 0]
            return (lost.max() / scores.abs().max()).item()

        with torch.no_grad():
            yield check(name, way, dtype, 1e-6 if dtype == "float32" else max(usual, 5e-3), differing)


def waits(device: str) -> Iterator[Check]:
    """How often a padded batch and a padded prompt make the host wait for a GPU, ours and transformers' class."""
    skip_all_padding()
    for family, what in (("bert", "batch"), ("qwen3", "prompt")) if device != "cpu" else ():
        torch.manual_seed(0)
        theirs = official_models()[family]().eval()
        ours = converted(theirs).eval().to(device, torch.bfloat16)
        usual = _waits(theirs.to(device, torch.bfloat16), inputs_of(ours, device))
        for way in ("as loaded", "prepared"):
            if way == "prepared":
                ours.prepare_for_inference()
            count = _waits(ours, inputs_of(ours, device))
            yield Check("waits", f"a padded {what}, {way}", "bfloat16", count, usual, count <= usual)


@torch.no_grad()
def _waits(model, batch: dict[str, torch.Tensor]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        model(**batch)  # what is made once
        torch.cuda.synchronize()
        warnings.simplefilter("always")
        seen.clear()
        torch.cuda.set_sync_debug_mode("warn")
        model(**batch)
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in seen)
