"""Compiled functions: for which module the code on the disk is, what they see of its changes, whose code they run."""

import copy
import functools
import json
import os
import threading

import pytest
import torch
from pairs import assert_close
from sizes import STRONG
from torch import nn
from torch.export import Dim
from torch.nn.utils import parametrizations
from transformers import AttentionInterface

import blockformer
from blockformer import preset
from blockformer.engine import cache_folder, compiled, compiling, measure, onednn
from blockformer.engine.attention import is_in_use
from blockformer.engine.compiled import CompiledFunction
from blockformer.engine.linear import QuickLinear
from blockformer.engine.onednn import PackedCopies
from blockformer.engine.origin import Origin
from blockformer.model.attention import ALL_ATTENTION_FUNCTIONS

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 61,
    "initializer_range": 0.3,
}  # fmt: skip
VARYING = ({0: Dim.DYNAMIC},)


def network(width=24):
    """Two layers of one size, an activation and a norm, with a config as every part of a model has one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
    module.config = preset("qwen3", **SIZES)
    return module.eval().requires_grad_(False)


def states(width=24):
    return torch.randn(7, width, generator=torch.Generator().manual_seed(1))


def digest_of(module, threads=None):
    tensors = dict(module.named_parameters(remove_duplicate=False))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        return compiled._digest(module, tensors, (states(),), VARYING, False)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def said(monkeypatch):
    """What the user was warned of."""
    warned: list[str] = []
    for module in (compiled, cache_folder):
        monkeypatch.setattr(module.logger, "warning_once", warned.append)
    return warned


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A cache folder that nothing is in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "blockformer"


def test_the_name_of_code_tells_ties_settings_and_threads_apart():
    module, others = network(), [network() for _ in range(3)]
    others[0][2].weight = others[0][0].weight
    others[1][1].approximate = "tanh"
    others[2][3].eps = 1e-3
    names = {digest_of(each) for each in (module, *others)} | {digest_of(module, threads) for threads in (1, 3, 4)}
    assert len(names) >= 6  # the tests themselves run with some number of threads
    assert digest_of(module) == digest_of(copy.deepcopy(module)) == digest_of(network())


def test_the_name_of_code_tells_what_it_is_given_apart():
    """Of a model whose embeddings have another dtype than its layers."""
    module = network()
    tensors = dict(module.named_parameters())
    given = [states(), states().bfloat16(), states()[:5]]
    assert len({compiled._digest(module, tensors, ([each], each, None), VARYING, False) for each in given}) == 3


def test_functions_that_were_given_something_are_told_apart():
    """transformers' GELU in its tanh form is such a one: GPT-2 has it."""
    names = set()
    for given in ({}, {"approximate": "none"}, {"approximate": "tanh"}):
        module = network()
        module[1].function = functools.partial(nn.functional.gelu, **given)
        assert compiled._unknown_code(module) is None
        names.add(digest_of(module))
    assert len(names) == 3


@pytest.mark.parametrize("name", blockformer.PRESETS)
def test_no_preset_has_code_of_other_packages(name):
    config = preset(name, **({"vocab_size": 60000} if name in ("marian",) else {}))
    kind = "EncoderDecoder" if config.is_encoder_decoder else "Decoder" if config.is_decoder else "Encoder"
    with torch.device("meta"):
        model = getattr(blockformer, f"Blockformer{kind}Model")(config)
    assert compiled._unknown_code(model) is None


class Doubled(nn.Linear):
    """A class that its user may edit."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_nothing_is_compiled_if_one_part_cannot_be(said, monkeypatch):
    monkeypatch.setattr(compiled, "compile_to", lambda *_, **__: pytest.fail("a part was compiled"))
    last = network()
    last.append(Doubled(24, 24))
    parts = [(module, (states(),), VARYING) for module in (network(), last)]
    assert compiled.functions_of(parts, None) is None
    assert len(said) == 1


@pytest.mark.parametrize("change", [
    lambda module: setattr(module, "1", Doubled(24, 24)),
    lambda module: setattr(module[1], "function", lambda states: states),
    lambda module: setattr(module[1], "function", functools.partial(lambda states: states)),
    lambda module: setattr(module[1], "function", functools.partial(torch.add, alpha=Doubled(2, 2))),
])  # fmt: skip
def test_code_of_other_packages_runs_uncompiled(change, said):
    module = network()
    change(module)
    assert CompiledFunction.of(module, (states(),), VARYING) is None
    assert len(said) == 1
    assert "test_compiled" in said[0]


def test_only_our_attention_is_compiled(monkeypatch):
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES))
    assert is_in_use(model.config)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *given, **more: None)
    assert not is_in_use(model.config)
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    assert not is_in_use(model.config)


@torch.no_grad()
def test_another_attention_than_ours_is_attended_by(untraced, monkeypatch):
    """Also once steps have been compiled."""
    model = (
        blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES)).eval().prepare_for_inference(compile=True)
    )
    ids, called = torch.tensor([[3, 4, 5, 6]]), []
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module, query, *given, scaling, **more):
        called.append(module)
        return ours(module, query, *given, scaling=3 * scaling, **more)

    def written():
        return model.generate(ids, max_new_tokens=3, do_sample=False, output_scores=True, return_dict_in_generate=True)

    first = written()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sharper", sharper)
    model.set_attn_implementation("sharper")
    second = written()
    assert called
    assert not torch.allclose(first.scores[0], second.scores[0])
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, written().scores, first.scores))


@pytest.fixture(scope="module")
def made(folder):
    """A compiled network and one that reads packed copies, each with its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_ask", lambda job: compiling._make(compiling.pickle.loads(job)))
        patch.setattr(measure, "_verdicts", {**measure._verdicts, "onednn": True, "packed, torch.float32": True})
        plain, packed = network(), network()
        functions = [CompiledFunction.of(plain, (states(),), VARYING)]
        if onednn.can_pack(torch.float32):
            patch.setattr("blockformer.engine.linear._LEAST_PACKED_WEIGHTS", 0)
            for layer in (packed[0], packed[2]):
                layer.__class__ = QuickLinear
            functions.append(CompiledFunction.of(packed, (states(),), VARYING, PackedCopies()))
            assert len(functions[1]._packed) == 2
        return list(zip([plain, packed], functions, strict=False))


def tie(module):
    module[2].weight = module[0].weight


def untie(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone(), requires_grad=False)


def merge(module):
    """As PEFT merges an adapter."""
    module[0].weight.data += 0.5 * torch.randn(24, 24)


def quantize(module):
    module[0].weight.data = module[0].weight.data.round()


def swap(module):
    module[2] = copy.deepcopy(module[2])
    module[2].weight.mul_(-1)


CHANGES = [merge, quantize, tie, merge, untie, merge, tie, untie]


@pytest.mark.parametrize("shape", [(64, 96), (130, 77), (48, 1000)])
def test_a_write_through_data_to_some_rows_or_columns_is_seen(shape):
    """As whoever takes out a head writes, which PyTorch does not count."""
    layer = nn.Linear(shape[1], shape[0])
    places = [(layer._parameters, "weight")]
    for dim in (0, 1, 0):
        layer.weight.data = layer.weight.data.t()  # some adapters leave one that is not contiguous
        for part in layer.weight.data.chunk(8, dim):
            origin = Origin(places, sampled=True)
            assert origin.is_of(places)
            part.add_(1)
            assert not origin.is_of(places)


def test_states_of_another_dtype_never_reach_the_code(made):
    """Some models have layers of several; it would read them by the wrong size."""
    module, function = made[0]
    assert function(states().double()) is None
    assert_close(function(states()), module(states()))


@torch.no_grad()
@pytest.mark.parametrize("which", [0, 1], ids=["plain", "packed"])
def test_a_change_of_weights_is_seen_or_the_module_runs_itself(made, which):
    if which == len(made):
        pytest.skip("this PyTorch has no packed product of torch.float32 here")
    module, function = made[which]
    assert function is not None
    assert_close(function(states()), module(states()))
    answered = 0
    for change in CHANGES:
        change(module)
        for _ in range(2):
            found = function(states())
            answered += found is not None
            if found is not None:
                assert_close(found, module(states()))
    assert answered >= 2 * len(CHANGES) - 2
    bias = module[0].bias
    module[0].bias = None
    assert function(states()) is None
    module[0].bias = bias
    assert function(states()) is not None
    whole = module[2].weight.data
    module[2].weight.data = whole[:7]  # at the same address
    assert function(states()) is None
    module[2].weight.data = whole
    assert function(states()) is not None
    function_of_learning(module, function)
    parametrizations.weight_norm(module[0])
    assert function(states()) is None


def function_of_learning(module, function):
    module[0].weight.requires_grad_(True)
    assert function(states()) is not None
    with torch.enable_grad():
        assert function(states()) is None
    module[0].weight.requires_grad_(False)


@torch.no_grad()
def test_weights_of_few_numbers_are_read_and_not_written_into_the_code(folder, said):
    """Inductor by itself does so with vectors of up to 8 numbers."""
    module = network(8)
    function = CompiledFunction.of(module, (states(8),), VARYING)
    for part in (module[3], module[0]):
        for tensor in part.parameters():
            tensor.add_(torch.randn(tensor.shape))
            assert_close(function(states(8)), module(states(8)))
    other = CompiledFunction.of(network(8), (states(8),), VARYING)  # finds the same code
    assert_close(other(states(8)), network(8)(states(8)))
    assert not said


@torch.no_grad()
def test_weights_that_are_swapped_are_let_go_of(folder):
    module = network(8)
    function = CompiledFunction.of(module, (states(8),), VARYING)
    assert_close(function(states(8)), module(states(8)))
    given = dict(function._code.tensors)
    for _ in range(20):
        module[0].weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        assert_close(function(states(8)), module(states(8)))
    assert len(given) == len(list(module.parameters()))
    assert all(function._code.tensors[name] is tensor for name, tensor in given.items())  # PyTorch holds each for good


@torch.no_grad()
def test_settings_of_the_user_and_of_other_threads_do_not_reach_the_compiler(folder, monkeypatch, said):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    flags, ask = [], compiling._ask
    watching = threading.Event()

    def watched(job):
        thread = threading.Thread(target=lambda: flags.append((torch.compiler.is_compiling(), measure.is_enabled())))
        thread.start()
        thread.join()
        watching.set()
        return ask(job)

    monkeypatch.setattr(compiling, "_ask", watched)
    module = network(40)
    with torch._inductor.config.patch(freezing=True):  # monkeypatch would delete the setting afterwards
        function = CompiledFunction.of(module, (states(40),), VARYING)
    assert watching.is_set()
    assert flags == [(False, True)]
    assert not said
    assert_close(function(states(40)), module(states(40)))


@torch.no_grad()
def test_another_thread_s_trace_leaves_this_one_its_fast_paths(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as while any thread exports
    assert torch.compiler.is_compiling()
    assert measure.is_enabled()
    assert not measure.is_exported()


def test_the_compiler_s_process_is_started_anew(monkeypatch):
    compiling._ask(b"no job")
    first = compiling._idle[-1]
    assert "UnpicklingError" in compiling._ask(b"no job")
    assert compiling._idle[-1] is first
    for each in compiling._idle:
        each._process.kill()
        each._process.wait()
    assert "UnpicklingError" in compiling._ask(b"no job")
    assert compiling._idle[-1] is not first
    monkeypatch.setattr(compiling, "_PROGRAM", "raise SystemExit(3)")
    compiling._end()
    assert "ended with code" in compiling._ask(b"no job")
    assert not compiling._idle


def test_code_is_not_made_of_files_that_were_changed_meanwhile(tmp_path):
    job = compiling._Job(network(), (states(),), VARYING, False, str(tmp_path / "code.pt2"), {}, 2, {}, "others")
    with pytest.raises(RuntimeError, match="restart it"):
        compiling._make(job)


def test_what_goes_to_the_compiler_has_no_weights_and_nothing_of_the_user_s(tmp_path, monkeypatch):
    sizes = {**SIZES, "vocab_size": 50_000, "tie_word_embeddings": True}
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **sizes)).eval()
    model.lock = threading.Lock()
    jobs = []
    monkeypatch.setattr(compiling, "_ask", jobs.append)
    compiling.compile_to(tmp_path / "code.pt2", model, (), (), False)
    assert len(jobs[0]) < 50_000
    job = compiling.pickle.loads(jobs[0])
    assert not hasattr(job.module, "lock")
    assert job.module.lm_head.weight is job.module.model.embed_tokens.weight  # ties are kept
    assert [each.shape for each in job.module.parameters()] == [each.shape for each in model.parameters()]


def test_code_that_is_not_what_was_written_is_made_anew(elsewhere, monkeypatch, said):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: "code")
    monkeypatch.setattr(compiled, "compile_to", lambda path, *_: path.write_bytes(b"code"))
    folder = cache_folder.trusted_folder()
    assert folder == elsewhere
    assert folder.stat().st_mode & 0o777 == 0o700
    assert compiled._compile(None, (), (), False, folder, "digest").runner == "code"
    assert compiled._load(folder, "digest").runner == "code"
    (path,) = folder.glob("digest-*.pt2")
    with open(path, "wb") as file:
        file.write(b"evil")
    assert compiled._load(folder, "digest") is None
    assert "its content has changed" in said[-1]
    assert compiled._compile(None, (), (), False, folder, "digest").runner == "code"
    (path,) = folder.glob("digest-*.pt2")
    os.chmod(path, 0o666)
    assert compiled._load(folder, "digest") is None
    assert "others can write it" in said[-1]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chmod(path, 0o644)
    assert (compiled._load(folder, "digest") is None) == (os.stat(path).st_uid != 0)


@pytest.mark.parametrize("kind", ["others can write", "of somebody else", "no home", "unreadable"])
def test_a_folder_that_others_have_is_not_used(elsewhere, kind, monkeypatch, said):
    elsewhere.mkdir()
    if kind == "others can write":
        os.chmod(elsewhere, 0o777)
        assert cache_folder.trusted_folder() == elsewhere  # it is ours: nobody else can write there any more
        assert elsewhere.stat().st_mode & 0o777 == 0o755
        return
    if kind == "of somebody else":
        os.chmod(elsewhere, 0o777)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    elif kind == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(cache_folder.Path, "home", no_home)
    else:
        denied = PermissionError(13, "Permission denied")

        def deny(*_, **__):
            raise denied

        monkeypatch.setattr(cache_folder.Path, "mkdir", deny)
    folder = cache_folder.trusted_folder()
    assert folder != elsewhere
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(said) == 1
    assert "for this process only" in said[0]
    monkeypatch.setenv("BLOCKFORMER_DECISIONS", "")
    monkeypatch.delenv("BLOCKFORMER_DECISIONS")
    assert measure.decisions_file() is None
    assert measure.is_measured(f"a question of {kind}", lambda: True)


def test_code_on_a_read_only_disk_is_loaded(elsewhere, monkeypatch, said):
    """As in a container's image. What is not there is compiled for this process."""
    elsewhere.mkdir()
    read_only = OSError(30, "Read-only file system")

    def refuse(*_, **__):
        raise read_only

    monkeypatch.setattr(cache_folder.Path, "chmod", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_folder.trusted_folder() == elsewhere
    assert not said
    assert cache_folder.trusted_folder(to_write=True) != elsewhere
    assert "for this process only" in said[-1]


@pytest.fixture
def decisions(monkeypatch, tmp_path):
    """A file of decisions, and no answer in this process."""
    monkeypatch.setenv("BLOCKFORMER_DECISIONS", str(tmp_path / "decisions.json"))
    monkeypatch.setattr(measure, "_verdicts", {})
    return tmp_path / "decisions.json"


def ask(answer, question="x", threads=2):
    """What is answered to a process that measures this."""
    before = torch.get_num_threads()
    for known in (measure._verdicts, *measure._with_other_threads.values()):
        known.clear()
    torch.set_num_threads(threads)
    try:
        return measure.is_measured(question, lambda: answer)
    finally:
        torch.set_num_threads(before)


def test_what_one_process_has_measured_all_of_them_do(decisions):
    assert ask(True)
    assert ask(False)
    assert not ask(False, threads=1)  # another question
    assert not ask(True, threads=1)
    assert ask(True, ("y", 1))
    kept = json.loads(decisions.read_text())
    assert sorted(kept.values(), key=len) == [{"x": False}, {"x": True, "('y', 1)": True}]
    assert all("threads, torch " in machine for machine in kept)
    one = next(machine for machine in kept if " 2 threads" in machine)
    decisions.write_text(json.dumps({one: {"x": False}}))  # a person decides
    assert not ask(True)


def test_a_process_asks_anew_for_another_number_of_threads(decisions, monkeypatch):
    monkeypatch.setattr(measure, "_with_other_threads", {})
    before = torch.get_num_threads()
    try:
        for threads, answer, kept in ((2, True, True), (1, False, False), (2, False, True), (1, True, False)):
            torch.set_num_threads(threads)
            assert measure.is_measured("threads", lambda answer=answer: answer) is kept
            assert measure.verdicts()["threads"] is kept
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_a_file_of_decisions_that_is_named_decides_for_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_file", [])
    monkeypatch.setattr(measure, "_verdicts", {})
    model = blockformer.BlockformerEncoderModel(preset("bert", **STRONG))
    file = tmp_path / "decisions.json"
    model.prepare_for_inference(decisions=file)
    assert measure.decisions_file() == file
    kept = json.loads(file.read_text())[measure.machine()]
    assert measure.is_measured("onednn", lambda: pytest.fail("it is known")) is kept["onednn"]
    for answer in (True, False):
        other = tmp_path / f"{answer}.json"
        other.write_text(json.dumps({measure.machine(): {"x": answer}}))
        model.prepare_for_inference(decisions=str(other))
        assert measure.is_measured("x", lambda: pytest.fail("it is known")) is answer
    for damaged in ("{", "[]", '{"machine": 1}', "no"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"decisions\.json is not a file of decisions"):
            model.prepare_for_inference(decisions=file)
        assert file.read_text() == damaged
    with pytest.raises(ValueError, match="cannot be read"):
        model.prepare_for_inference(decisions=tmp_path)
    assert measure.decisions_file() == other


def test_a_damaged_file_of_decisions_is_written_anew(decisions):
    for damaged in ("", "{", "[]", '{"machine": 1}'):
        decisions.write_text(damaged)
        assert ask(True)
        assert ask(False)
    decisions.unlink()
    decisions.mkdir()
    assert not ask(False)
    assert ask(True)
