"""Several threads write with one prepared or compiled model, each the text that one thread writes."""

import copy
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from packaging.version import Version
from pairs import token_ids
from sizes import STRONG, UNEVEN

import blockformer
from blockformer import preset
from blockformer.engine import compiler

UNEVEN_AND_LONGER = {**UNEVEN, "max_position_embeddings": 96}
FAMILIES = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "gpt2": {},
    "mistral": {"sliding_window": 8},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"shared_expert_intermediate_size": 64},
    "t5": {"decoder_start_token_id": 0, "head_dim": 64},
    "bart": {"decoder_start_token_id": 2},
}
THREADS = 4
# Rows, tokens and how they are written: each thread does all of them, each in another order.
JOBS = [
    (1, 5, {}),
    (1, 33, {}),
    (3, 9, {}),
    (1, 17, {"num_beams": 3}),
    (2, 40, {"max_new_tokens": 4}),
    (1, 9, {"repetition_penalty": 1.3}),
]


def make(family, sizes=None):
    torch.manual_seed(0)
    config = preset(family, **({**UNEVEN_AND_LONGER, **FAMILIES[family]} if sizes is None else sizes))
    cls = blockformer.BlockformerDecoderForCausalLM
    if config.is_encoder_decoder:
        cls = blockformer.BlockformerEncoderDecoderForConditionalGeneration
    return cls(config).eval()


def written(model, job):
    """The tokens of a job; all rows but the first are padded."""
    rows, length, settings = job
    ids = token_ids(rows, length, seed=length, vocab=model.config.get_text_config(decoder=True).vocab_size)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, slice(-2 * row, None) if model.config.is_encoder_decoder else slice(2 * row)] = 0
    given = {"max_new_tokens": 10, "do_sample": False, **settings}
    return model.generate(ids * mask, attention_mask=mask, **given)


def assert_threads_agree(model, expected, rounds, jobs=JOBS):
    """All threads begin together, and an error in one of them is one here."""
    together = threading.Barrier(THREADS, timeout=60)

    def work(number):
        together.wait()
        first = number % len(jobs)
        order = [*range(first, len(jobs)), *range(first)]
        return [(each, written(model, jobs[each])) for _ in range(rounds) for each in order]

    with ThreadPoolExecutor(THREADS) as pool:
        found = [each for texts in pool.map(work, range(THREADS)) for each in texts]
    assert len(found) == THREADS * rounds * len(jobs)
    for each, text in found:
        assert torch.equal(text, expected[each]), jobs[each]


def test_compiled_functions_wait_while_another_thread_traces():
    """PyTorch refuses to call them meanwhile, whatever it is that the other thread traces; since 2.14 it does not."""
    refuses = Version(torch.__version__) < Version("2.14")
    begun, may_end, states = threading.Event(), threading.Event(), torch.ones(2)

    def traced(states):
        begun.set()
        may_end.wait(60)
        return states + 1

    plain = torch.compile(lambda states: states * 3, backend="eager")
    patient = compiler._patient(plain)
    assert torch.equal(patient(states), 3 * states)
    with ThreadPoolExecutor(2) as pool:
        trace = pool.submit(torch.fx.symbolic_trace, traced)
        begun.wait(60)
        if refuses:
            with pytest.raises(RuntimeError, match="symbolically trace a dynamo-optimized"):
                plain(states)
        waiting = pool.submit(patient, states)
        time.sleep(0.05)
        assert not (refuses and waiting.done())
        may_end.set()
        assert torch.equal(waiting.result(60), 3 * states)
        trace.result(60)


def texts_of(model, jobs=JOBS):
    texts = [written(model, job) for job in jobs]
    assert all(not torch.equal(*two) for two in itertools.combinations(texts, 2))
    return texts


def cases(usual, settings=({},)):
    pairs = itertools.product(FAMILIES, settings)
    return [
        pytest.param(name, each, marks=[] if (name, each) in usual else pytest.mark.exhaustive) for name, each in pairs
    ]


USUAL = [("qwen3", torch.float32), ("t5", torch.float32)]


@pytest.mark.parametrize(("family", "dtype"), cases(USUAL, (torch.float32, torch.bfloat16)))
def test_threads_write_with_a_prepared_model(family, dtype):
    """Its first texts too: what is measured or put in order on first use is done while others write."""
    plain = make(family).to(dtype)
    model = copy.deepcopy(plain).prepare_for_inference()
    assert {type(part) for part in model.modules()} != {type(part) for part in plain.modules()}
    expected = texts_of(copy.deepcopy(model))
    assert_threads_agree(model, expected, rounds=2)
    assert_threads_agree(model.prepare_for_training().prepare_for_inference(), expected, rounds=1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("family", "_"), cases([("qwen3", {})]))
def test_threads_write_with_a_compiled_model(family, _, request):
    """Steps are compiled by whichever thread comes first, and its code runs for one thread at a time."""
    jobs, sizes = JOBS, None
    if not request.node.get_closest_marker("exhaustive"):  # a model that other tests compile, too
        jobs, sizes = [job for job in JOBS if job[0] == 1 and "num_beams" not in job[2]], STRONG
    plain = make(family, sizes)
    model = copy.deepcopy(plain).prepare_for_inference(compile=True)
    expected = texts_of(plain, jobs)
    assert_threads_agree(model, expected, rounds=2, jobs=jobs)
    assert model.runtime.decoding.steps.kinds()
    assert_threads_agree(model.prepare_for_training(), expected, rounds=1, jobs=jobs)
