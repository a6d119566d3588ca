"""What `gpu.py` checks besides logits: training, loading, several devices, 4 bits, beams, sequences without padding.

Each use says how far its answer is from that of the CPU in float32, as a share of the largest value.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from gpu_checks import MOST, Check, check, error_of, logits, skip_all_padding
from gpu_models import LENGTH, ROWS, converted, inputs_of, official_models, project
from safetensors.torch import load_file, save_file

EXACT, ROUNDED = 1e-4, 0.05
"""How far float32 and 16 bits may be from the CPU's float32."""


def uses(device: str) -> Iterator[Check]:
    """Every use, in turn."""
    skip_all_padding()
    has_accelerate = transformers.utils.is_accelerate_available()
    for use, (most, dtype) in USES.items():
        if use in NEEDS_ACCELERATE and not has_accelerate:
            continue
        found = check("uses", use.__doc__.splitlines()[0].rstrip("."), dtype, most / MOST, lambda u=use: u(device))
        yield replace(found, theirs=float("nan"))  # what is allowed, and not what transformers' class does


def _model(name: str = "qwen3"):
    torch.manual_seed(0)
    return converted(official_models()[name]().eval()).eval()


def prepared_before_it_moves(device: str) -> float:
    """Prepared on the CPU, then moved, and back."""
    model = _model()
    exact = logits(model, "cpu")
    model.prepare_for_inference()
    moved = error_of(logits(model.to(device), device), exact)
    return max(moved, error_of(logits(model.to("cpu"), "cpu"), exact))


def prepared_and_trained_again(device: str) -> float:
    """Prepared, then trained: gradients."""
    model, ids = _model(), inputs_of(_model(), "cpu")["input_ids"]

    def gradient(model) -> torch.Tensor:
        model.zero_grad()
        model(input_ids=ids.to(model.device), labels=ids.to(model.device)).loss.backward()
        return model.get_input_embeddings().weight.grad.double().cpu()

    exact = gradient(model)
    model = model.to(device).prepare_for_inference()
    logits(model, device)
    return error_of(gradient(model.prepare_for_training()), exact)


def checkpointed(device: str) -> float:
    """Gradient checkpointing under autocast: gradients."""
    model, ids = _model(), inputs_of(_model(), "cpu")["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    exact = [weight.grad.double() for weight in model.parameters()]
    model.zero_grad()
    model = model.to(device).train()
    model.gradient_checkpointing_enable()
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    return max(error_of(weight.grad.double().cpu(), one) for weight, one in zip(model.parameters(), exact, strict=True))


def loaded_by_a_map(device: str) -> float:
    """Saved, and loaded by `device_map`, half of the layers on the CPU."""
    model = _model()
    exact = logits(model, "cpu")
    places = {"": "cpu"} if device == "cpu" else _half_on_the_cpu(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, device_map=places).eval()
        whole = type(model).from_pretrained(folder, device_map="auto").eval()
    return max(error_of(logits(each, device), exact) for each in (loaded, whole))


def _half_on_the_cpu(model) -> dict[str, int | str]:
    """Every module that has parameters gets a place: the second layer the CPU, all others the GPU."""
    found: dict[str, int | str] = {}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        layer, is_second, _ = module.partition(".layers.1.")
        found[f"{layer}.layers.1" if is_second else module] = "cpu" if is_second else 0
    return found


def by_the_code_of_its_repo(device: str) -> float:
    """Loaded by the code that a repo carries."""
    model = _model()
    exact = logits(model, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        name = config["auto_map"]["AutoModelForCausalLM"]
        kind = transformers.dynamic_module_utils.get_class_from_dynamic_module(name, folder)
        loaded = kind.from_pretrained(folder).eval().to(device)
    return error_of(logits(loaded, device), exact)


def trained_by_the_trainer(device: str) -> float:
    """Trainer in bfloat16, ten steps with the fused AdamW: losses."""
    text = torch.randint(3, 118, (40, LENGTH), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in text]

    def losses(place: str, **more) -> torch.Tensor:
        model = _model()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=10, logging_steps=1, report_to=[], use_cpu=place == "cpu", disable_tqdm=True,
                per_device_train_batch_size=ROWS, save_strategy="no", learning_rate=1e-3, seed=1, **more,
            )  # fmt: skip
            steps = {"callbacks": [project().StopOnNonFiniteLoss()]}
            trainer = transformers.Trainer(model, arguments, train_dataset=rows, **steps)
            trainer.train()
            found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return torch.tensor(found, dtype=torch.float64)

    return error_of(losses(device, bf16=True), losses("cpu"))


def four_bits(device: str) -> float:
    """4-bit AWQ weights in float16."""
    torch.manual_seed(0)
    peer = official_models()["qwen3"]().eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        state, generator = load_file(file), torch.Generator().manual_seed(1)
        for name in [name for name in state if ".layers." in name and state[name].dim() == 2]:
            outputs, inputs = state.pop(name).shape
            top = name.removesuffix("weight")

            def words(rows: int, columns: int) -> torch.Tensor:
                return torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()

            state |= {f"{top}qweight": words(inputs, outputs), f"{top}qzeros": words(inputs // 32, outputs)}
            scales = torch.rand(inputs // 32, outputs, generator=generator) / 50 + 0.01
            state[f"{top}scales"] = scales.half()
        save_file(state, file, {"format": "pt"})
        config = json.loads((Path(folder) / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = project().from_official(folder).eval()
    exact = logits(copy.deepcopy(model).float(), "cpu")
    model = model.half().to(device)
    return max(error_of(logits(each, device), exact) for each in (model, copy.deepcopy(model).prepare_for_inference()))


def _texts(device: str, **asked) -> tuple[float, float]:
    """The share of tokens that differ from the CPU's, plain or prepared, and transformers' own share."""
    ours, batch = _model(), inputs_of(_model(), "cpu")
    torch.manual_seed(0)
    theirs = official_models()["qwen3"]().eval()
    rows = 1 if "prompt_lookup_num_tokens" in asked else ROWS
    batch = {name: batch[name][:rows] for name in ("input_ids", "attention_mask")}

    def written(model, **more) -> torch.Tensor:
        given = {name: tensor.to(model.device) for name, tensor in batch.items()}
        return model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False, **more).cpu()

    def differing(model, expected) -> float:
        return (written(model, **asked) != expected).double().mean().item()

    plain = {name: value for name, value in asked.items() if name != "cache_implementation"}
    exact = written(ours, **plain)
    ours, theirs = ours.to(device), theirs.to(device)
    shares = [differing(ours, exact), differing(ours.prepare_for_inference(), exact)]
    return max(shares), differing(theirs, exact)


def beams(device: str) -> tuple[float, float]:
    """Beams: the share of tokens that differ."""
    return _texts(device, num_beams=3)


def captured_beams(device: str) -> float:
    """Beams by captured steps, of a decoder and an encoder-decoder: the share of tokens that differ."""
    shares = []
    for name in ("qwen3", "marian"):
        model, batch = _model(name), inputs_of(_model("qwen3"), "cpu")
        given = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
        texts = []
        for place in ("cpu", device):
            model = model.to(place)
            model = model if place == "cpu" else model.prepare_for_inference(compile=True)
            moved = {name: batch[name].to(place) for name in ("input_ids", "attention_mask")}
            texts.append(model.generate(**moved, **given).cpu())
        shares.append((texts[0] != texts[1]).double().mean().item() if texts[0].shape == texts[1].shape else 1.0)
        if device != "cpu" and (reasons := project().explain(model).fallbacks):
            raise AssertionError(f"{name}: {reasons}")
    return max(shares)


def drafts(device: str) -> tuple[float, float]:
    """Drafts from the prompt: the share of tokens that differ."""
    return _texts(device, prompt_lookup_num_tokens=3)


def offloaded(device: str) -> tuple[float, float]:
    """A cache offloaded to the CPU: the share of tokens that differ."""
    return _texts(device, **({} if device == "cpu" else {"cache_implementation": "offloaded"}))


def without_padding(device: str) -> float:
    """Sequences in one row with `cu_seq_lens_q`, compared with one at a time."""
    model = _model()
    generator, lengths = torch.Generator().manual_seed(2), (5, 11, 1, 8)
    ids = torch.randint(3, 118, (1, sum(lengths)), generator=generator)
    parts = ids.split(lengths, dim=1)
    with torch.no_grad():
        exact = torch.cat([model(input_ids=part).logits[0] for part in parts]).double()
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    places = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    model, found = model.to(device, torch.bfloat16), []
    for each in (model, copy.deepcopy(model).prepare_for_inference()):
        with torch.no_grad():
            found.append(each(input_ids=ids.to(device), position_ids=places, use_cache=False, **given).logits[0])
    return max(error_of(each.double().cpu(), exact) for each in found)


def as_one_graph(device: str) -> float:
    """`torch.compile(fullgraph=True)` of the forward pass."""
    model = _model()
    exact = logits(model, "cpu")
    model = model.to(device)
    model.forward = torch.compile(model.forward, fullgraph=True)
    return error_of(logits(model, device, use_cache=False), exact)


def states_of_layers(device: str) -> float:
    """States of every layer of a prepared encoder."""
    model, batch = _model("bert"), inputs_of(_model("bert"), "cpu")
    mask = batch["attention_mask"].bool()

    def states(model) -> torch.Tensor:
        with torch.no_grad():
            given = {name: tensor.to(model.device) for name, tensor in batch.items()}
            found = model(**given, output_hidden_states=True).hidden_states
        return torch.stack([each.double().cpu()[mask] for each in found])

    exact = states(model)
    return error_of(states(model.to(device).prepare_for_inference()), exact)


def explained(device: str) -> float:
    """`explain` and `warm_up`."""
    model = _model().to(device, torch.bfloat16).prepare_for_inference(compile=device != "cpu")
    print(project().explain(model))
    batch = {name: tensor for name, tensor in inputs_of(model, device).items() if name != "position_ids"}
    project().warm_up(model, [batch])
    return 0.0


def beside_others(device: str) -> float:
    """Texts by captured steps, after another model's were freed and another program's were captured."""
    texts, is_compiled = [], device != "cpu"
    for name in ("t5", "qwen3"):
        model = _model(name).to(device).prepare_for_inference(compile=is_compiled)
        ids = torch.randint(3, 118, (16, 9), generator=torch.Generator().manual_seed(3)).to(device)
        texts += [model.generate(ids, max_new_tokens=12, do_sample=False) for _ in range(2)]
    if is_compiled:
        other = torch.compile(torch.nn.Linear(64, 64).to(device), mode="reduce-overhead")
        with torch.no_grad():
            for _ in range(4):
                other(torch.ones(16, 64, device=device))
        torch.cuda.empty_cache()
    last = model.generate(ids, max_new_tokens=12, do_sample=False)
    return float(not torch.equal(last, texts[-1])) + float(not torch.equal(texts[-1], texts[-2]))


def captured_and_changed(device: str) -> float:
    """Texts by captured steps, after weights were written and replaced: the share of tokens that differ."""
    model, batch = _model(), inputs_of(_model(), "cpu")
    texts: list[list[torch.Tensor]] = [[], []]
    for place, found in zip(("cpu", device), texts, strict=True):
        own = copy.deepcopy(model).to(place)
        own = own if place == "cpu" else own.prepare_for_inference(compile=True)
        moved = {name: batch[name].to(place) for name in ("input_ids", "attention_mask")}
        layer = own.model.layers[0]
        for change in ("none", "written", "replaced"):
            if change == "written":
                with torch.no_grad():
                    layer.self_attn.k_proj.weight.mul_(-1)
            elif change == "replaced":
                layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.flip(0)
            with torch.inference_mode():
                found.append(own.generate(**moved, max_new_tokens=12, min_new_tokens=12, do_sample=False).cpu())
    return max((one != other).double().mean().item() for one, other in zip(*texts, strict=True))


def several_threads(device: str) -> float:
    """Texts by captured steps of four threads, each on a stream of its own: the share of tokens that differ."""
    model, batch = _model(), inputs_of(_model(), "cpu")
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    rows = [batch["input_ids"][row : row + 1] for row in range(ROWS)]
    exact = [model.generate(row, **asked) for row in rows]
    model = model.to(device).prepare_for_inference(compile=device != "cpu")

    def written(row) -> torch.Tensor:
        if device == "cpu":
            return model.generate(row, **asked)
        with torch.cuda.stream(torch.cuda.Stream()):
            return model.generate(row.to(device), **asked).cpu()

    with ThreadPoolExecutor(ROWS) as pool:
        found = [text for _ in range(3) for text in pool.map(written, rows)]
    return max((one != other).double().mean().item() for one, other in zip(found, exact * 3, strict=True))


def eight_bits(device: str) -> float:
    """Weights in 8 bits by torchao: compiled text, compared with uncompiled: the share of tokens that differ."""
    if importlib.util.find_spec("torchao") is None:
        return 0.0
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _model().to(device, torch.bfloat16)
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    batch = {name: each for name, each in inputs_of(model, device).items() if name != "position_ids"}
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        plain = model.generate(**batch, **asked)
        model.prepare_for_inference(compile=device != "cpu")
        return (model.generate(**batch, **asked) != plain).double().mean().item()


USES: dict[Callable[[str], float | tuple[float, float]], tuple[float, str]] = {
    prepared_before_it_moves: (EXACT, "float32"),
    prepared_and_trained_again: (EXACT, "float32"),
    checkpointed: (ROUNDED, "bfloat16"),
    loaded_by_a_map: (EXACT, "float32"),
    by_the_code_of_its_repo: (EXACT, "float32"),
    trained_by_the_trainer: (ROUNDED, "bfloat16"),
    four_bits: (ROUNDED, "float16"),
    beams: (EXACT, "float32"),
    captured_beams: (EXACT, "float32"),
    drafts: (EXACT, "float32"),
    offloaded: (EXACT, "float32"),
    without_padding: (ROUNDED, "bfloat16"),
    as_one_graph: (EXACT, "float32"),
    states_of_layers: (EXACT, "float32"),
    explained: (EXACT, "bfloat16"),
    beside_others: (EXACT, "float32"),
    captured_and_changed: (EXACT, "float32"),
    several_threads: (EXACT, "float32"),
    eight_bits: (0.5, "bfloat16"),
}
"""How far each may be from the CPU's float32, and in which dtype it runs."""
NEEDS_ACCELERATE = {loaded_by_a_map, trained_by_the_trainer}
