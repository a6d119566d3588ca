"""Damaged and hostile checkpoints, one from each number, and what must hold when they are read or converted.

`python tests/conversion/fuzzing.py FOLDER FIRST COUNT` runs that many cases in this process and prints the failures as
JSON. (Those below 0 are forbidden deeds that must fail.) A case is its number alone, so a failure is run again with
`python tests/conversion/fuzzing.py FOLDER NUMBER 1`, the folder any empty one. The number of the case that runs is in
`FOLDER/progress`, for whoever watches over hangs.
"""

import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load as library_load
from safetensors.torch import save_file

from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.plan import plan_in, plan_out
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import read_header, read_tensor

SECONDS = 5
"""Processor time that one case may take; a forbidden one, which takes all of it, a fifth."""
MEMORY = 256 << 20
"""Bytes of memory, address space included, that all cases together may take beyond what the imports took."""
MESSAGE = 30_000
"""Characters that an error message may have."""

NAMES = [
    *("", ".", "..", "/", "../secret.safetensors", "../../etc/passwd", "/etc/passwd", "C:\\x", "a\\b", "con", "a\0b"),
    *("__metadata__", "__class__", "__proto__", "{layer}", "{0.__class__}", "%s%n", "$(id)", "`id`", ".*", "(a+)+$"),
    *("\x1b[2J\x1b]0;x\x07", "\r", "\n", "\u202e", "\ufeff", "\ud800", "é" * 3, "\U0001f600", "x" * 5000, "9" * 400),
    *("model.layers.0", "model.layers.00.mlp.up_proj.weight", "model.layers.-1.input_layernorm.weight"),
    *(
        f"model.layers.{'1' * 30}.input_layernorm.weight",
        "model.layers.\u0663.input_layernorm.weight",
        "lm_head.weight",
    ),
    *("auto_map", "model_type", "architectures", "weight_map", "dtype", "shape", "data_offsets", "pipe.safetensors"),
    *("folder.safetensors", "link.safetensors", "model-00001-of-00003.safetensors", "MODEL-00001-of-00003.SAFETENSORS"),
]
NUMBERS = [0, 1, 2, 3, -1, -2, 7, 8, 16, 255, 65536, 100_000, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62]
NUMBERS += [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 1e300, 5e-324]


class Raw(str):
    """Text that stands in JSON as it is."""


class Entries(list):
    """The pairs of a JSON object, so that a name may be there twice."""


RAW = [Raw(text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "01", "+1", "0x1", "'a'")]
RAW += [Raw(text) for text in ('"\\ud800"', '"\\u0000"', '"', "{", "]", "", "[" * 100_000, "1" * 5000, "// x", "1,")]
RAW += [Raw('{"a":' * 50_000), Raw("[" * 900 + "]" * 900), Raw("-" + "9" * 4000), Raw("0." + "3" * 5000)]


def parsed(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=Entries)


def text_of(node: Any) -> str:
    if isinstance(node, Raw):
        return node
    if isinstance(node, Entries):
        return "{" + ",".join(f"{text_of(name)}:{text_of(value)}" for name, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(text_of, node)) + "]"
    return json.dumps(node)


def hostile(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(NAMES)
    if kind == 1:
        return rng.choice(RAW)
    if kind == 2:
        return rng.choice([None, True, False, [], Entries(), "", "1", "nan", "true", [None], [[]], Entries([("a", 1)])])
    if kind == 3:
        return [rng.choice(NUMBERS) for _ in range(rng.choice([1, 2, 3, 70]))]
    if kind == 4:
        return Entries((rng.choice(NAMES), rng.choice(NUMBERS)) for _ in range(rng.randrange(1, 4)))
    return rng.choice(NUMBERS)


def containers(node: Any) -> list[Any]:
    found = [node] if isinstance(node, list) and node else []
    for child in node if isinstance(node, list) else ():
        found += containers(child[1] if isinstance(node, Entries) else child)
    return found


def changed_json(rng: random.Random, text: bytes) -> bytes:
    """JSON with one to three of its numbers, names, entries or nestings changed."""
    root = [parsed(text)]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = containers(root)
        if not root:
            break
        parent = rng.choice(places[1:] or places)
        at = rng.randrange(len(parent))
        pairs = isinstance(parent, Entries)
        name, value = parent[at] if pairs else ("", parent[at])
        kind = rng.randrange(8)
        if kind == 0:
            del parent[at]
        elif kind == 1 and pairs:
            parent[at] = (rng.choice(NAMES), value)
        elif kind == 2:
            parent.insert(rng.randrange(len(parent) + 1), (name, hostile(rng)) if pairs else value)
        elif kind == 3:
            other = rng.choice(rng.choice(places))
            moved = other[1] if isinstance(other, tuple) else other
            moved = Raw(text_of(moved))  # a copy, never a ring
            parent[at] = (name, moved) if pairs else moved
        elif kind == 4 and pairs:
            parent.append((rng.choice(NAMES), hostile(rng)))
        elif kind == 5 and type(value) is int:
            value += rng.choice([-1, 1, 8, -8, value, 2**32])
            parent[at] = (name, value) if pairs else value
        else:
            new = hostile(rng)
            parent[at] = (name, new) if pairs else new
    result = "".join(map(text_of, root)).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, result) if rng.random() < 0.1 else result


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes with one to six places flipped, overwritten, put in, taken out, doubled, or cut off."""
    whole = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 6])):
        at, length = rng.randrange(len(whole) + 1), rng.choice([1, 2, 4, 8, 40])
        kind = rng.randrange(7)
        if kind == 0 and at < len(whole):
            whole[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(whole):
            whole[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, *b'{}[]",:\\/09-. \n'])
        elif kind == 2:
            whole[at:at] = rng.randbytes(length)
        elif kind == 3:
            del whole[at : at + length]
        elif kind == 4:
            whole[at:at] = whole[at : at + length]
        elif kind == 5:
            number = rng.choice([0, 1, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), len(data) - 8])
            size = rng.choice([2, 4, 8])
            whole[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        elif rng.random() < 0.3:
            del whole[at:]
    return bytes(whole)


def changed_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file damaged anywhere, or with another header over the same body."""
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = changed_json(rng, data[8 : 8 + length])
    said = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS[:14]) % 2**64
    return int(said).to_bytes(8, "little") + header + data[8 + length :]


# What `torch.load` may meet in a pickle, put over or into it.
OPCODES = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"\x93", b"R", b"b", b"\x81", b"i", b"o", b"\x8f"]
OPCODES += [b"\x8a\xff" + b"\xff" * 255, b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"I9999999999999\n", b".", b"0"]
OPCODES += [b"r\xff\xff\xff\xff", b"j\xff\xff\xff\x7f", b"(" * 2000, b"]" * 2000 + b"a" * 1999, b"h\xff", b"Q", b"}"]


def changed_bin(rng: random.Random, path: Path) -> bytes:
    """A pickled checkpoint damaged anywhere or, if it is a zip, inside its records, with right checksums."""
    data = path.read_bytes()
    if not zipfile.is_zipfile(path):
        return changed_pickle(rng, data) if rng.random() < 0.5 else changed_bytes(rng, data)
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    with zipfile.ZipFile(path) as archive:
        records = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    at = rng.choice([0, 0, 0, rng.randrange(len(records))])
    name, content = records[at]
    kind = rng.randrange(4)
    if kind == 0:
        records[at] = (rng.choice(["x/data/0", "../out", "/out", "x/constants.pkl", rng.choice(NAMES) or "x"]), content)
    elif kind == 1 and rng.random() < 0.3:
        del records[at]
    else:
        records[at] = (name, changed_pickle(rng, content))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in records:
            archive.writestr(name.encode("utf-8", "replace").decode(), content)
    return out.getvalue()


def changed_pickle(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.5 or not data:
        return changed_bytes(rng, data)
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(OPCODES) + data[at + rng.choice([0, 0, 1, 4]) :]


# --- the good files -------------------------------------------------------------------------------------------------

COMMON = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
OFFICIAL: dict[str, dict[str, Any]] = {
    "qwen3": {**COMMON, **WIDTH, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
    "mistral": {**COMMON, **WIDTH, "num_key_value_heads": 1, "max_position_embeddings": 64, "sliding_window": 8},
    "bert": {**COMMON, **WIDTH, "max_position_embeddings": 32},
    "gpt2": {**COMMON, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "t5": {**COMMON, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "bart": {**COMMON, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
    | {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
    | {"forced_eos_token_id": 2, "decoder_start_token_id": 2},
}
SIDE = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors", "conversion.json")


class Cases:
    """The good checkpoints in a folder, and every kind of case made of them.

    Args:
        base: an empty folder.
    """

    def __init__(self, base: Path):
        self.base, self.work = base, base / "work"
        self.good: dict[str, Path] = {}
        torch.manual_seed(0)
        for name, sizes in OFFICIAL.items():
            family = FAMILIES[name]
            folder = base / "good" / name
            model_class = getattr(transformers, family.heads[0].official)
            model_class(family.settings.official_class(**sizes)).save_pretrained(folder)
            (folder / "tokenizer_config.json").write_text('{"model_max_length": 32, "tokenizer_class": "X"}')
            convert(folder, base / "good" / f"ours-{name}", verify=False)
            convert(base / "good" / f"ours-{name}", base / "warm", to_official=True, verify=False)
            shutil.rmtree(base / "warm")
            self.good[name] = folder
            self.good[f"ours-{name}"] = base / "good" / f"ours-{name}"
        self.tensors = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5).double(), "c": torch.randn(2, 2)}
        self.plain = base / "good" / "plain.safetensors"
        save_file(self.tensors, self.plain, metadata={"format": "pt"})
        save_file({"secret": torch.zeros(1)}, base / "secret.safetensors")
        for zipped in (True, False):
            path = base / "good" / f"{'zip' if zipped else 'legacy'}.bin"
            torch.save({**self.tensors, "tied": self.tensors["c"]}, path, _use_new_zipfile_serialization=zipped)
        self.kinds: list[tuple[Callable[[random.Random], None], int]] = [
            (self.header, 34),
            (self.index, 16),
            (self.pickled, 18),
            (self.names, 20),
            (self.config, 10),
            (self.whole, 2),
        ]
        self.plans: dict[str, Any] = {}
        for name, folder in self.good.items():
            with Checkpoint(folder) as checkpoint:
                self.plans[name] = (checkpoint.config, checkpoint.tensors)

    def run(self, number: int) -> None:
        """One case; raises what it must not."""
        rng = random.Random(number)
        kinds, shares = zip(*self.kinds, strict=True)
        (kind,) = rng.choices(kinds, shares) if number >= 0 else (lambda _: self.forbidden(number),)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        try:
            kind(rng)
        except ConversionError as error:
            self.check_message(error)

    def forbidden(self, number: int) -> None:
        """What the watch must see: a fuzzer that finds nothing could also be blind."""
        if number == -1:
            os.system("true")
        elif number == -2:
            bytearray(2 * MEMORY)
        elif number == -3:
            (self.base / "elsewhere").unlink(missing_ok=True)
            raise ConversionError("out of memory")
        elif number == -4:
            (self.base / "elsewhere").write_text("x")
        elif number == -5:
            (self.base / "secret.safetensors").read_bytes()
        elif number == -6:
            while True:
                pass
        else:
            raise KeyError("x")

    def check_message(self, error: ConversionError) -> None:
        text = str(error)
        assert not any(words in text for words in ("out of memory", "no memory for", "allocate")), (
            f"took memory: {text}"
        )
        assert len(text) < MESSAGE, f"{len(text)} characters: {text[:500]}"
        assert all(letter.isprintable() or letter == "\n" for letter in text), f"not fit for a terminal: {text!r}"

    def header(self, rng: random.Random) -> None:
        path = self.work / "x.safetensors"
        data = changed_safetensors(rng, self.plain.read_bytes())
        path.write_bytes(data)
        with open_regular(path) as file:
            infos = read_header(file, path)
            read = {info.name: read_tensor(file, info) for info in infos}
        theirs = library_load(data)  # what we take, the library takes too, and sees the same in it
        assert theirs.keys() == read.keys()
        for name, tensor in read.items():
            assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
            assert same(tensor, theirs[name])

    def index(self, rng: random.Random) -> None:
        files = {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate(self.tensors, 1)}
        for name, file in files.items():
            save_file({name: self.tensors[name]}, self.work / file)
        (self.work / "config.json").write_text("{}")
        (self.work / "folder.safetensors").mkdir()
        (self.work / "link.safetensors").symlink_to(self.base / "secret.safetensors")
        os.mkfifo(self.work / "pipe.safetensors")
        text = json.dumps({"metadata": {"total_size": 104}, "weight_map": files}).encode()
        changed = changed_json(rng, text) if rng.random() < 0.7 else changed_bytes(rng, text)
        (self.work / "model.safetensors.index.json").write_bytes(changed)
        with Checkpoint(self.work) as checkpoint:
            read = {name: checkpoint.read(name) for name in checkpoint.tensors}
        assert all(same(tensor, self.tensors[name]) for name, tensor in read.items())
        # An index may speak of fewer shards; of those that it names, it must say everything.
        assert json.loads(changed)["weight_map"] == {name: files[name] for name in read}

    def pickled(self, rng: random.Random) -> None:
        (self.work / "config.json").write_text("{}")
        data = changed_bin(rng, self.base / "good" / rng.choice(["zip.bin", "zip.bin", "legacy.bin"]))
        (self.work / "pytorch_model.bin").write_bytes(data)
        with Checkpoint(self.work) as checkpoint:
            for name, info in checkpoint.tensors.items():
                tensor = checkpoint.read(name)
                assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape)
                assert tensor.nbytes <= len(data) or not tensor.nbytes

    def names(self, rng: random.Random) -> None:
        """Hostile names beside and instead of a family's own, through its spellings and its rules."""
        name = rng.choice(list(OFFICIAL))
        config, tensors = self.plans[name]
        family = FAMILIES[name]
        found = dict(tensors)
        for _ in range(rng.choice([1, 1, 2, 5])):
            old = rng.choice(sorted(found))
            new = rng.choice(NAMES) if rng.random() < 0.4 else changed_name(rng, old)
            if rng.random() < 0.5:
                found[new] = found[old]
            elif new not in found:
                found[new] = found.pop(old)
        variant = family.names.variant_of(config, found, lambda _: torch.zeros(1))
        spellings = family.names.spelled(variant)
        canonical = {spellings.to_class(own): own for own in found}
        for own in found:
            assert isinstance(spellings.to_file(own), str)
        headers = {new: found[own] for new, own in canonical.items()}
        groups = family.names.layout(variant, family.settings.our_config(family.config_from(config, variant))).plan(
            headers
        )
        assert all(target.name.isprintable() for group in groups for target in group.targets)

    def config(self, rng: random.Random) -> None:
        """A changed `config.json`, or changed names, up to the plan."""
        name = rng.choice(list(self.good))
        shutil.copy(self.good[name] / "model.safetensors", self.work)
        for side in ("config.json", "conversion.json"):
            if (self.good[name] / side).exists():
                text = (self.good[name] / side).read_bytes()
                change = side == "config.json" if rng.random() < 0.8 else side == "conversion.json"
                (self.work / side).write_bytes(changed_json(rng, text) if change else text)
        with Checkpoint(self.work) as checkpoint:
            plan = (plan_out if name.startswith("ours-") else plan_in)(checkpoint, None, None)
        strict = json.loads(
            plan.config_json, parse_constant=lambda constant: (_ for _ in ()).throw(ValueError(constant))
        )
        assert isinstance(strict, dict)

    def whole(self, rng: random.Random) -> None:
        """A changed file of any kind, through a whole conversion."""
        name = rng.choice(list(self.good))
        source, target = self.work / "source", self.work / "deep" / "target"
        shutil.copytree(self.good[name], source)
        side = rng.choice([side for side in SIDE if (source / side).exists()])
        data = (source / side).read_bytes()
        change = changed_safetensors if side.endswith(".safetensors") else changed_json
        (source / side).write_bytes(change(rng, data) if rng.random() < 0.8 else changed_bytes(rng, data))
        if rng.random() < 0.2:
            (source / "conversion").mkdir(exist_ok=True)
            (source / "conversion" / "unused.safetensors").write_bytes(
                changed_safetensors(rng, self.plain.read_bytes())
            )
        before = contents(source)
        try:
            convert(
                source,
                target,
                to_official=name.startswith("ours-"),
                verify=False,
                max_shard_size=rng.choice([2000, "5GB"]),
            )
        except ConversionError:
            assert os.listdir(self.work) == ["source"], f"left behind: {os.listdir(self.work)}"
            raise
        finally:
            assert contents(source) == before
        assert sorted(os.listdir(self.work)) == ["deep", "source"]
        assert os.listdir(self.work / "deep") == ["target"]
        with Checkpoint(target) as checkpoint:
            for own in checkpoint.tensors:
                checkpoint.read(own)


def changed_name(rng: random.Random, name: str) -> str:
    """A tensor's name with one part changed."""
    parts = name.split(".")
    at = rng.randrange(len(parts))
    kind = rng.randrange(6)
    if kind == 0:
        parts[at] = rng.choice(NAMES)
    elif kind == 1:
        del parts[at]
    elif kind == 2:
        parts.insert(at, rng.choice([*parts, "0", "1", "99", "model", "transformer"]))
    elif kind == 3:
        parts[at] = rng.choice(["00", "-1", "+1", "1_0", "\u0661", "1e0", "999999999", "9999999999", " 1"])
    elif kind == 4:
        parts[at] = parts[at].upper()
    else:
        parts[at] += rng.choice(["\n", " ", "\0", "\x1b[0m", "\u200b", ".", "weight"])
    return ".".join(parts)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- watching -------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A case took more processor time than it may."""


class Watch:
    """Notes what a case does to the system: code run, processes, connections, files opened to write elsewhere.

    Args:
        base: where cases may write.
    """

    EVENTS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn")

    def __init__(self, base: Path):
        self.work, self.secret = str(base / "work"), str(base / "secret.safetensors")
        self.found: list[str] = []
        self.on = False
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in self.EVENTS:
            self.found.append(f"{event} {args!r}"[:300])
        elif event == "open" and isinstance(args[0], (str, bytes)):
            path, flags = os.path.abspath(os.fsdecode(args[0])), args[2] or 0
            if path == self.secret:
                self.found.append("reads outside of its folder")
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not path.startswith(self.work) and path != os.devnull:
                self.found.append(f"writes {path}")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def main(base: Path, first: int, count: int) -> None:
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # nothing here is about power cuts
    cases, watch = Cases(base), Watch(base)
    around = sorted(os.listdir(base))
    limit = status("VmSize") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def too_long(*_: Any) -> None:
        raise TooLong("more processor time than a case may take")

    signal.signal(signal.SIGPROF, too_long)
    progress = os.open(base / "progress", os.O_CREAT | os.O_WRONLY)
    around = sorted({*around, "progress", "work"})
    failures, longest, start = [], (0.0, -1), time.monotonic()
    for number in range(first, first + count):
        os.pwrite(progress, b"%20d" % number, 0)
        began = time.process_time()
        watch.on = True
        signal.setitimer(signal.ITIMER_PROF, SECONDS if number >= 0 else SECONDS / 5)
        problem = None
        try:
            cases.run(number)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-3:]
            place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
            problem = f"{type(error).__name__}: {str(error)[:1000]!r} at {place}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            watch.on = False
        longest = max(longest, (time.process_time() - began, number))
        if watch.found:
            problem = f"{problem or ''} {watch.found}"
            watch.found.clear()
        if sorted(os.listdir(base)) != around:
            problem = f"{problem or ''} left files: {sorted(os.listdir(base))}"
        if problem is not None:
            failures.append({"case": number, "problem": problem})
            if len(failures) == 100:
                break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    result = {"failures": failures, "longest": longest, "grown": grown, "seconds": time.monotonic() - start}
    print(json.dumps({**result, "processor": time.process_time()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))
