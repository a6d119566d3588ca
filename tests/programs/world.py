"""A world of processes that do tasks of `scale_steps.py`: forks of this one."""

import json
import multiprocessing
import sys

sys.path.append(sys.argv[1])
import scale_steps

scale_steps.blockformer.engine.runtime.TrainingRuntime.least_saving = 0  # as in a test
tasks, size = json.loads(sys.argv[3]), int(sys.argv[4])
context = multiprocessing.get_context("fork")
given = [(tasks, rank, size, sys.argv[2]) for rank in range(size)]
processes = [context.Process(target=scale_steps.run, args=each) for each in given]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
