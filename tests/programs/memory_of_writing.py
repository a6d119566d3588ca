"""Read, transpose and write a checkpoint tensor by tensor; print how much memory that took at its peak.

Done first with a small one, which touches the libraries' own pages.
"""

import sys

from blockformer.conversion.rules.operations import Transpose
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.writer import ShardWriter


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def write(source, target):
    with Checkpoint(source) as source:
        plan = RuleTable([Rule("t{layer}", "u{layer}", Transpose())]).plan(source.tensors)
        with ShardWriter(target, [(t.name, t.dtype, t.shape) for group in plan for t in group.targets]) as shards:
            for group in plan:
                for name, tensor in group.apply(source.read):
                    shards.write_parts(name, [tensor])
                del tensor


write(*sys.argv[1:3])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
before = status("VmRSS")
write(*sys.argv[3:5])
print(status("VmHWM") - before)
