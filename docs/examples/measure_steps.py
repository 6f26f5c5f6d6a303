"""Measures the steps of a real engine, for ``minisgl simulate --calibrate steps.jsonl``.

Run it: python docs/examples/measure_steps.py steps.jsonl [--model PATH and other settings]
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from minisgl.base.types import GenerateRequest, SamplingParams
from minisgl.client.pipeline import Pipeline
from minisgl.config.load import load_settings
from minisgl_cli.simulate.calibrate import write_steps
from minisgl_cli.simulate.replay import timed

SIZES = ((1, 16), (1, 128), (4, 64), (8, 16), (8, 128), (16, 64))  # requests that run together, tokens of each prompt
WARM_UP = 8  # steps that are not counted


def main(path: str, argv: list[str]) -> None:
    """Run batches of several sizes one step at a time, and write what each step computed and how long it took."""
    loaded = load_settings(argv=[*argv, "--loop", "sync", "--cache", "naive"])
    rng = Random(0)
    with Pipeline(loaded.settings, registry=loaded.registry, hooks=loaded.hooks) as pipeline:
        timer = timed(pipeline)
        for requests, length in SIZES:
            for _ in range(requests):
                ids = tuple(rng.randrange(pipeline.info.vocab) for _ in range(length))
                pipeline.submit(GenerateRequest(ids=ids, sampling=SamplingParams(max_tokens=16, ignore_eos=True)))
            left = requests
            while left:
                left -= sum(getattr(out, "finish", None) is not None for out in pipeline.step())
    write_steps(Path(path), timer.steps[WARM_UP:])
    print(f"{len(timer.steps) - WARM_UP} steps written to {path}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
