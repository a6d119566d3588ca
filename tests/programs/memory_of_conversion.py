"""Convert a large checkpoint, or load it from the disk, and say how much memory it took."""

import json
import resource
import sys
import threading
import time

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from blockformer.conversion import ConversionError, convert


def status(*names):
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return [int(lines[name].split()[0]) * 1024 for name in names]


def dirty():
    with open("/proc/meminfo") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Dirty:", "Writeback:")))


class Peak:
    # The largest resident size of this process, anonymous and file pages apart, and of the machine's dirty pages.
    def __enter__(self):
        self.before, self.dirty_before = status("RssAnon", "RssFile"), dirty()
        self.peaks, self.dirty, self.over = list(self.before), self.dirty_before, threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()
        return self

    def sample(self):
        while not self.over.wait(0.02):
            self.peaks = [max(pair) for pair in zip(self.peaks, status("RssAnon", "RssFile"), strict=True)]
            self.dirty = max(self.dirty, dirty())

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()

    def result(self):
        anonymous, file = (peak - before for peak, before in zip(self.peaks, self.before, strict=True))
        return {"anonymous": anonymous, "file": file, "total": sum(self.peaks), "dirty": self.dirty - self.dirty_before}


def limited(nbytes):
    limit = status("VmSize")[0] + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def converting(small, source, target, to_official, limit):
    convert(small, target + "-warm", verify=False)
    with Peak() as peak:
        limited(limit)
        start = time.monotonic()
        try:
            convert(source, target, to_official=to_official, verify=False)
            outcome = "converted"
        except ConversionError as error:
            outcome = str(error)
    return {**peak.result(), "outcome": outcome, "seconds": time.monotonic() - start}


def offloaded(folder, offload):
    import blockformer

    with Peak() as peak:
        model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={"cpu": "1GiB"}, offload_folder=offload
        )
        places = sorted(set(map(str, model.hf_device_map.values())))
        with torch.no_grad():
            logits = model(torch.arange(16)[None]).logits
    return {**peak.result(), "places": places, "finite": bool(logits.isfinite().all())}


print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
