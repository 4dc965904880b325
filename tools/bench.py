"""Benchmarks, measured side by side in one run.

    ./launch.sh bench load [--gb 2] [--ranks 1,2,3] [--repeats 5] [--out bench.json]

load    Loading a generated checkpoint of --gb GB in bf16. With one rank: the time of `load_dit` beside that of
        safetensors.load_file with every tensor copied (load_file alone only maps the file), each in a process
        of its own, in turns, the file in the page cache; the median of the ratios. With 1, 2, 3, ... ranks: how
        far a rank's memory rises above what it was before, which should be its shard and no more.

A table on the screen; the figures as JSON in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from safetensors.torch import load_file, save_file

import nft_krea2 as k2

ENV = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def peak_gib() -> float:
    """The most memory that this process has held so far, mapped files included."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


def apart(*arguments: str, ranks: int = 1) -> list[dict]:
    """Run this file in fresh processes; the JSON object that each rank prints."""
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run([sys.executable, *launch, __file__, "--worker", *arguments], env=ENV, text=True,
                          stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"bench: {' '.join(arguments)} ended with {done.returncode}; its message stands above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# ------------------------------------------------------------------------------------------------------------
# load
# ------------------------------------------------------------------------------------------------------------

def write_checkpoint(folder: Path, gb: float) -> float:
    """A transformer folder of about `gb` GB, Krea-2's shape at width 2048, filled with noise; returns GiB."""
    sizes = dict(num_attention_heads=16, num_key_value_heads=4, intermediate_size=5504, text_hidden_dim=640,
                 text_num_attention_heads=5, text_num_key_value_heads=5, text_intermediate_size=1792)
    config = k2.Krea2Config(num_layers=max(1, round(gb / 0.1)), **sizes)     # a block is 0.1 GB
    with torch.device("meta"):
        state = k2.Krea2DiT(config).state_dict()
    noise = torch.randn(2**20).bfloat16()
    tensors = {k: noise.repeat(-(-v.numel() // len(noise)))[:v.numel()].view(v.shape) for k, v in state.items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return sum(v.nbytes for v in tensors.values()) / 2**30


def load_worker(how: str, folder: str) -> None:
    """Load in this process and print what it took."""
    torch.set_num_threads(1)
    c = k2.Config(device="cpu", world=int(os.environ.get("WORLD_SIZE", 1)))
    k2.start_processes(c)
    if c.world > 1:
        k2.gather_list([0])
    before, start = peak_gib(), time.perf_counter()
    if how == "load_file":
        kept = {k: v.clone() for k, v in load_file(f"{folder}/diffusion_pytorch_model.safetensors").items()}
        held = sum(v.nbytes for v in kept.values())
    else:
        model = k2.load_dit(folder, prepare=k2.shard if c.world > 1 else None)
        held = sum(k2.local(p).nbytes for p in model.parameters())
    print(json.dumps(dict(seconds=time.perf_counter() - start, held=held / 2**30, before=before,
                          peak=peak_gib())), flush=True)
    if c.world > 1:
        torch.distributed.destroy_process_group()


def bench_load(gb: float, ranks: list[int], repeats: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        size = write_checkpoint(Path(folder), gb)
        pairs = [(apart("load", "load_dit", folder)[0]["seconds"],
                  apart("load", "load_file", folder)[0]["seconds"]) for _ in range(repeats)]
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"load    {size:.2f} GiB, one rank: load_dit {statistics.median(p[0] for p in pairs):.2f} s, "
              f"load_file {statistics.median(p[1] for p in pairs):.2f} s, ratio {ratio:.2f}", flush=True)
        memory = {}
        for n in ranks:
            worst = max(apart("load", "load_dit", folder, ranks=n), key=lambda x: x["peak"] - x["before"])
            memory[n] = dict(shard=worst["held"], rise=worst["peak"] - worst["before"], peak=worst["peak"])
            print(f"        {n} rank(s): a shard of {memory[n]['shard']:.2f} GiB, memory rises by "
                  f"{memory[n]['rise']:.2f} to {memory[n]['peak']:.2f} GiB", flush=True)
        return dict(gib=size, ratio=ratio, memory=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["load"])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint, GB [2]")
    parser.add_argument("--ranks", default="1,2,3", help="rank counts [1,2,3]")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each time [5]")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    o = parser.parse_args()
    figures = {"load": bench_load(o.gb, [int(n) for n in o.ranks.split(",")], o.repeats)}
    if o.out:
        k2.write_atomic(o.out, lambda part: part.write_text(json.dumps(figures, indent=2) + "\n"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        load_worker(*sys.argv[3:])
    else:
        main()
