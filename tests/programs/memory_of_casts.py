"""Convert a checkpoint, and print how much memory that took at its peak.

Done first with a small one, which touches the libraries' own pages.
"""

import json
import sys

from blockformer.conversion import convert


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


small, large, target, settings = *sys.argv[1:4], json.loads(sys.argv[4])
convert(small, f"{target}-small", verify=False, **settings)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
before = status("VmRSS")
convert(large, target, verify=False, **settings)
print(status("VmHWM") - before)
