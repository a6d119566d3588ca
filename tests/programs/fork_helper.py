"""The helper of `fork_server.py`: it does each job that comes as a line of JSON in a child of its own.

Arguments: the folder of programs, and the file that has `Refuse`.
"""

import gc

gc.disable()
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402

import torch  # noqa: E402, F401

# The modules that most jobs load first.
from transformers import (  # noqa: E402, F401
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

programs, refusing = sys.argv[1:]
sys.path.append(programs)
Refuse = runpy.run_path(refusing)["Refuse"]


def do(job):
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        sys.argv[1:] = job["arguments"]
        if job["elsewhere"]:
            sys.meta_path[:0] = [Refuse("blockformer"), Refuse("conversion")]
        exec(compile(job["code"], "job", "exec"), {"__name__": "__main__", "sys": sys})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


assert "blockformer" not in sys.modules
gc.freeze()  # or every collection in a child would look through all of this, and copy the memory that it lies in
gc.enable()
for line in sys.stdin:
    child = os.fork()
    if not child:
        do(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
