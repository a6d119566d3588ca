"""Convert a checkpoint and list all that is opened, run, imported or connected to on the way."""

import json
import os
import socket  # noqa: F401  # what the hook sees of it is its use, not its import
import sys

sys.path.insert(0, "")  # as `python -c` has it: the source's own folder
sys.dont_write_bytecode = True
base, target = sys.argv[1:]
# All that is imported on the way is imported before anything is watched.
import torch  # noqa: E402, F401
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

import blockformer  # noqa: E402
import blockformer.conversion.families.llama  # noqa: E402
from blockformer.conversion import convert  # noqa: E402

found = []
source = os.path.join(base, "source")


def inside(path, folder):
    return os.path.realpath(os.fspath(path)).startswith(folder)


def code(path):
    return isinstance(path, str) and path.endswith((".py", ".pyc", ".so"))


def hook(event, args):
    try:
        if event == "open":
            path, mode, flags = args
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT
            )
            if isinstance(path, (str, bytes)):
                path = os.fsdecode(path)
                if writes and not path.startswith(os.path.join(base, ".dst.")) and path != os.devnull:
                    found.append(["writes", path])
                if inside(path, source) and code(path):
                    found.append(["reads code", path])
        elif event == "exec" and inside(args[0].co_filename, base):
            found.append(["runs", args[0].co_filename])
        elif event == "import" and str(args[0]).partition(".")[0] in ("evil", "generate", "modeling_evil"):
            found.append(["imports", args[0]])
        elif event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.fork"):
            found.append([event, str(args)])
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.chmod", "os.utime", "shutil.rmtree"):
            names = [os.fspath(arg) for arg in args if isinstance(arg, (str, os.PathLike))]
            own = (os.path.join(base, ".dst."), target)
            if any(name.startswith("/") and not name.startswith(own) for name in names):
                found.append([event, names])
    except Exception as error:
        found.append(["hook", repr(error)])


sys.addaudithook(hook)
report = convert(source, target)
blockformer.from_official(source)
listed = list(found)
assert report.parity.measured
assert report.parity.passed
print(json.dumps(listed))
