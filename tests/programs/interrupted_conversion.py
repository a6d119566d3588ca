"""One process imports everything once; each scenario runs in a fork of it and says how it ended."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import blockformer.cli.checkpoints  # noqa: E402, F401
from blockformer import cli, conversion  # noqa: E402
from blockformer.conversion import convert  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
base = Path(sys.argv[1])
source, big, target = base / "source", base / "big", base / "dst"


def at(count, action):
    # Do something when progress is told for the count-th time.
    def run(*args, progress, **kwargs):
        told = 0

        def report_progress(*step):
            nonlocal told
            told += 1
            if told == count:
                action()
            progress(*step)

        return convert(*args, progress=report_progress, **kwargs)

    conversion.convert = run


def interrupted(count):
    at(count, lambda: os.kill(os.getpid(), signal.SIGINT))
    cli.main(["convert", str(source), str(target)])


def terminated(count):
    at(count, lambda: os.kill(os.getpid(), signal.SIGTERM))
    cli.main(["convert", str(source), str(target)])


def killed(count):
    at(count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    cli.main(["convert", str(source), str(target), "--force"])


def little_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + (20 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    cli.main(["convert", str(big), str(target)])


def status(name):
    return (
        next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
        )
        * 1024
    )


def peak():
    convert(source, base / "warm", verify=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    convert(big, target, verify=False)
    print(json.dumps(status("VmHWM") - before), flush=True)


for name, *arguments in json.loads(sys.argv[2]):
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(send, 1)
        os.dup2(send, 2)
        try:
            globals()[name](*arguments)
            code = 0
        except SystemExit as end:
            code = end.code
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    os.close(send)
    text = b""
    while part := os.read(receive, 65536):
        text += part
    _, status_code = os.waitpid(pid, 0)
    left = sorted(os.listdir(base))
    for path in left:
        if path.endswith(".tmp"):
            shutil.rmtree(base / path)
    run = {"code": os.waitstatus_to_exitcode(status_code), "text": text.decode(), "left": left}
    print(json.dumps(run), flush=True)  # or the next child has it to write too
