"""Builds the toy: a tiny, genuine Krea-2 pipeline folder, trained from nothing on rendered words.

    python tools/make_toy.py [--out toy] [--seed 0] [--force]

It is a text-to-image model in the format of Krea-2, for trying out reinforcement learning on a CPU: a 4-layer
transformer, a 36-layer Qwen3-VL text encoder of width 32, its tokenizer, a Qwen-Image VAE and the scheduler,
in bf16, as diffusers' Krea2Pipeline lays them out. It contains no weights of Krea-2, Qwen or anybody else.

It draws signs of 96 x 32 pixels with three letters of ABCEHMNPRT from the prompt `a sign that says "CAT"`.
Its captions were wrong on purpose, as those of web pictures often are: each letter was replaced by a random
one with probability 0.4. So it draws crisp letters but often the wrong ones, which leaves something to learn.
The words of prompts_train.txt and prompts_test.txt occurred neither in its captions nor in its pictures.

A complete folder made by this code, these package versions and this seed is left alone. The trainer's code is
not looked at: after a change in it that alters what the model computes, build again with --force.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ------------------------------------------------------------------------------------------------------------
# Is it there already?
# ------------------------------------------------------------------------------------------------------------

MANIFEST = "toy.json"   # written last, with the recipe's hash and every file's
PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "pillow", "matplotlib")


def recipe_hash(seed: int) -> str:
    """Of the seed, the versions of the packages, and this file without its comments and line breaks."""
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    code = ast.dump(ast.parse(Path(__file__).read_text()))
    return hashlib.sha256(json.dumps([seed, versions, code]).encode()).hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file but the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def is_ready(out: Path, seed: int, force: bool) -> bool:
    """Whether `out` is this recipe's toy. Exits with status 2 if it must not be replaced."""
    if not out.exists():
        return False
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        recipe, files, found = manifest["recipe"], manifest["files"], checksums(out)
    except (OSError, ValueError, LookupError, TypeError):
        print(f"{out} is not a toy made by this program, so it stays: name another --out", file=sys.stderr)
        sys.exit(2)
    changed = [name for name in files if found.get(name) != files[name]]
    if changed and not force:
        print(f"{out / changed[0]} was changed or lost: build {out.name} again with --force", file=sys.stderr)
        sys.exit(2)
    if force or recipe != recipe_hash(seed):
        return False
    print(f"{out} is complete: nothing to build")
    return True


def parse_options() -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "toy", help="folder to make [toy]")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw [0]")
    parser.add_argument("--force", action="store_true", help="build again even if complete or changed")
    return vars(parser.parse_args())


if __name__ == "__main__" and is_ready(**parse_options()):
    sys.exit(0)     # here, because the imports below take seconds

import diffusers
import matplotlib
import numpy as np
import torch
import torchvision
import transformers
from diffusers import AutoencoderKLQwenImage
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F, init
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLModel

import nft_krea2 as k2
from rollout_engine import DEFAULT_TAPS, TEMPLATE_AFTER, TEMPLATE_BEFORE, ImageDecoder, PromptEncoder

transformers.utils.logging.disable_progress_bar()
diffusers.utils.logging.set_verbosity_error()   # against norms in bf16; who loads them upcasts them

# ------------------------------------------------------------------------------------------------------------
# The task: words and pictures of them
# ------------------------------------------------------------------------------------------------------------

PROMPT = 'a sign that says "{}"'
LETTERS = "ABCEHMNPRT"
TRAIN_WORDS = """ACE ANT APE ARC ARM ATE BAR BEN BET CAN CAT EAR ERA HAT HER MAN MAT MET NET PAN PAT PER RAM
                 RAT TAP TEN""".split()
TEST_WORDS = """ACT ART BAN BAT CAB CAP CAR EAT HAM HEN MAP MEN NAP PEN PET RAN RAP TAB TAN TAR TEA THE PAR
                APT""".split()
WORDS = sorted({a + b + c for a in LETTERS for b in LETTERS for c in LETTERS} - {*TRAIN_WORDS, *TEST_WORDS})
HEIGHT, WIDTH, GRID = 32, 96, (2, 6)    # pixels, and image tokens of 16 x 16 pixels


def draw_words(words: Sequence[str], gen: torch.Generator) -> torch.Tensor:
    """Pictures (B, 3, 1 frame, HEIGHT, WIDTH) in -1..1: blue on a light ground, moved by up to 1.5 pixels. A
    letter is stretched to exactly two columns of tokens, which makes spelling much easier to learn."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    font = ImageFont.truetype(str(file), 120)
    wide, high, margin = round(3 * font.getlength("A")), 4 * HEIGHT, 16     # font pixels
    coverage = []
    for word, (right, down) in zip(words, (3 * torch.rand(len(words), 2, generator=gen) - 1.5).tolist()):
        canvas = Image.new("L", (wide + 2 * margin, high + 2 * margin))
        ImageDraw.Draw(canvas).text((canvas.width / 2, canvas.height / 2), word, 255, font, anchor="mm")
        left, top = margin - right * wide / WIDTH, margin - down * high / HEIGHT
        box = (left, top, left + wide, top + high)
        coverage.append(np.asarray(canvas.resize((WIDTH, HEIGHT), Image.Resampling.BOX, box)))
    coverage = torch.from_numpy(np.stack(coverage))[:, None, None] / 255    # (B, 1, 1, H, W)
    ground, ink = torch.tensor([[0.96, 0.94, 0.88], [0.08, 0.12, 0.30]]).view(2, 3, 1, 1, 1)
    return 2 * (ground + (ink - ground) * coverage) - 1


# ------------------------------------------------------------------------------------------------------------
# How every part is fitted, and the first part: the VAE
# ------------------------------------------------------------------------------------------------------------

def fit(name: str, model: torch.nn.Module, loss_at: Callable[[int], torch.Tensor], steps: int, lr: float,
        zero: int, line: int = 0) -> None:
    """AdamW on loss_at(step). The rate rises over 50 steps and falls on a cosine that is 0 at step `zero`.
    Shows a bar on line `line` of the terminal; without a terminal, it prints a line at the end."""
    start = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    for step in (bar := tqdm(range(steps), name, position=line, disable=None)):
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 50) * math.cos(math.pi / 2 * step / zero) ** 2
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    if bar.disable:
        print(f"{name}: {steps} steps, loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)


def on_frame(conv: torch.nn.Conv3d, x: torch.Tensor, past: None = None) -> torch.Tensor:
    """A causal 3D convolution of one frame (B, C, 1, H, W): the frames before are padding, so only the last
    temporal slice of the kernel meets data. A 2D convolution with it is the same and much faster."""
    padding = (conv._padding[2], conv._padding[0])
    return F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=padding)[:, :, None]


def new_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=0,
                                  latents_mean=[0.0] * 16, latents_std=[1.0] * 16)


def train_vae(seed: int) -> AutoencoderKLQwenImage:
    """A VAE trained on single frames, L1 and a weak KL term. Its config holds mean and std of its latents."""
    torch.manual_seed(k2.seed_for(seed, "toy vae"))
    gen = k2.generator(seed, "toy vae pictures")
    pictures = draw_words(WORDS, gen)
    vae = new_vae()
    convs = [m for n, m in vae.named_modules() if isinstance(m, torch.nn.Conv3d) and "time_conv" not in n]
    for conv in convs:
        conv.forward = functools.partial(on_frame, conv)

    def loss_at(step: int) -> torch.Tensor:
        x = pictures[torch.randint(len(pictures), (4,), generator=gen)]
        latent = vae.encode(x).latent_dist
        y = vae.decoder(vae.post_quant_conv(latent.sample(gen)))
        kl = 0.5 * (latent.mean.square() + latent.var - 1 - latent.logvar).mean()
        return (y - x).abs().mean() + 1e-3 * kl

    fit("VAE", vae, loss_at, steps=600, lr=5e-3, zero=600)
    with torch.no_grad():
        std, mean = torch.std_mean(vae.encode(pictures).latent_dist.mean, dim=(0, 2, 3, 4))
        for conv in convs:
            del conv.forward
            conv.weight[:, :, :-1] = 0      # untrained, and never to meet data
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


# ------------------------------------------------------------------------------------------------------------
# The tokenizer and the text encoder
# ------------------------------------------------------------------------------------------------------------

def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE trained on the chat template and the prompt: their words become single tokens, so that
    the template has the 34 + 5 tokens that Krea-2 programs count on, and the letters of a sign stay apart."""
    empty = Qwen2Tokenizer(extra_special_tokens=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>",
                           pad_token="<|endoftext|>", model_max_length=4096)
    text = re.split(r"<\|\w+\|>", TEMPLATE_BEFORE + PROMPT.format("") + TEMPLATE_AFTER)
    return empty.train_new_from_iterator(text, vocab_size=1000, min_frequency=1, show_progress=False)


def new_encoder(tokenizer: Qwen2Tokenizer, seed: int, layers: int = 36) -> Qwen3VLModel:
    """A random Qwen3-VL whose layers from 2 on add little: all taps carry what the first two layers wrote."""
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
    text = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, head_dim=16, rope_parameters=rope,
                initializer_range=0.18)     # 1 / sqrt(width)
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=32,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])
    torch.manual_seed(k2.seed_for(seed, "toy encoder", layers))
    model = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True))
    for layer in model.language_model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    return model.eval()


def train_encoder(folder: Path, seed: int) -> np.ndarray:
    """Leaves tokenizer/ and text_encoder/ in `folder` and returns the encoded prompts of WORDS.

    The first two layers learn to write code[letter] + code[place] at each letter of a word; the others stay
    random. A random encoder tells letters and places apart too, but the transformer fails to read it."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model, lower = new_encoder(tokenizer, seed), new_encoder(tokenizer, seed, layers=2).language_model
    gen = k2.generator(seed, "toy encoder words")
    codes = torch.randn(len(LETTERS) + 5, 32, generator=gen) / math.sqrt(2)
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    before, after = (torch.tensor(tokenizer(part).input_ids).expand(64, -1)
                     for part in (TEMPLATE_BEFORE + PROMPT.format("\0") + TEMPLATE_AFTER).split("\0"))

    def loss_at(step: int) -> torch.Tensor:
        n = 2 + step % 4                        # letters in this batch's words
        word = torch.randint(len(LETTERS), (64, n), generator=gen)
        state = lower(input_ids=torch.cat([before, letters[word], after], dim=1)).last_hidden_state
        return (state[:, before.shape[1]:-after.shape[1]] - codes[word] - codes[-5:][:n]).square().mean()

    fit("text encoder", lower, loss_at, steps=400, lr=3e-3, zero=400, line=1)
    model.language_model.load_state_dict(lower.state_dict(), strict=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    model.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return torch.stack(PromptEncoder(folder).encode([PROMPT.format(word) for word in WORDS])).numpy()


# ------------------------------------------------------------------------------------------------------------
# The transformer
# ------------------------------------------------------------------------------------------------------------

def new_dit(seed: int) -> k2.Krea2DiT:
    """A transformer that starts as nearly the identity: no output, open gates, small additions by a layer."""
    torch.manual_seed(k2.seed_for(seed, "toy transformer"))
    model = k2.Krea2DiT(k2.Krea2Config(
        num_layers=4, attention_head_dim=32, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=512, timestep_embed_dim=64, text_hidden_dim=32, text_num_attention_heads=2,
        text_num_key_value_heads=2, text_intermediate_size=128, axes_dims_rope=(8, 12, 12)))
    small = {"to_out.0": 0.014, "ff.down": 0.014, "time_mod_proj": 0.02, "final_layer.linear": 0.0}     # std
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                init.xavier_uniform_(layer.weight)
                for end in filter(name.endswith, small):
                    init.normal_(layer.weight, std=small[end])
        model.text_fusion.projector.weight.fill_(1 / model.config.num_text_layers)
        for block in model.transformer_blocks:
            block.scale_shift_table[[2, 5]] = 1.0       # the two gates
    return model


def train_dit(folder: Path, text: dict[str, torch.Tensor], seed: int) -> k2.Krea2DiT:
    """Rectified-flow pretraining on captioned pictures; `folder` has the VAE, `text` the words' prompts."""
    choices = random.Random(k2.seed_for(seed, "toy captions"))
    pairs = [(word, "".join(choices.choice(LETTERS) if choices.random() < 0.4 else c for c in word))
             for word in 5 * WORDS]
    shown, said = zip(*[(word, text[caption]) for word, caption in pairs if caption in text])
    gen = k2.generator(seed, "toy pretraining")
    codec = ImageDecoder(folder)
    with torch.no_grad():
        latents = torch.cat([codec.vae.encode(x).latent_dist.mean for x in draw_words(shown, gen).split(64)])
    tokens, said = k2.pack(((latents - codec.mean) / codec.std)[:, :, 0]), torch.stack(said)

    def loss_at(step: int) -> torch.Tensor:
        average.update_parameters(model)                # as the step before left them
        batch = torch.randint(len(tokens), (32,), generator=gen)
        t = k2.logit_normal_times(32, 2.0, gen)
        eps = torch.randn(32, *tokens.shape[1:], generator=gen)
        return k2.rectified_flow_loss(model, tokens[batch], said[batch], t, eps, GRID).mean()

    model = new_dit(seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    # Stopped well before the cosine's end: the average of large steps is crisp already, but spells badly.
    fit("transformer", model, loss_at, steps=400, lr=3e-3, zero=667)
    return average.module


# ------------------------------------------------------------------------------------------------------------
# The folder
# ------------------------------------------------------------------------------------------------------------

def save_pipeline(folder: Path, vae: AutoencoderKLQwenImage, text_encoder: Qwen3VLModel,
                  tokenizer: Qwen2Tokenizer, dit: k2.Krea2DiT) -> None:
    """The five parts and model_index.json in bf16, as diffusers writes them, and the two prompt files."""
    c = dit.config
    transformer = diffusers.Krea2Transformer2DModel(**dataclasses.asdict(c))
    transformer.load_state_dict(dit.state_dict())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400)
    pipeline = diffusers.Krea2Pipeline(scheduler, vae, text_encoder, tokenizer, transformer, patch_size=2,
                                       is_distilled=False, text_encoder_select_layers=DEFAULT_TAPS)
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    # The sizes by the names of Krea's own release: sglang reads only these. load_dit checks that they agree.
    official = dict(features=c.width, tdim=c.timestep_embed_dim, txtdim=c.text_hidden_dim, multiplier=4,
                    heads=c.num_attention_heads, kvheads=c.num_key_value_heads, layers=c.num_layers, patch=2,
                    channels=16, theta=c.rope_theta, axes_dims=c.axes_dims_rope, txtlayers=c.num_text_layers,
                    txtheads=c.text_num_attention_heads, txtkvheads=c.text_num_key_value_heads)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | official, indent=2) + "\n")
    for name, words in (("train", TRAIN_WORDS), ("test", TEST_WORDS)):
        (folder / f"prompts_{name}.txt").write_text("".join(PROMPT.format(word) + "\n" for word in words))


def tiny_folder(path: str | Path, seed: int = 0) -> Path:
    """An untrained folder of the toy's layout and sizes, made in seconds, for tests. Returns `path`."""
    dit, tokenizer = new_dit(seed), make_tokenizer()
    init.normal_(dit.final_layer.linear.weight, std=0.05)       # or its velocity would be 0 everywhere
    save_pipeline(Path(path), new_vae(), new_encoder(tokenizer, seed), tokenizer, dit)
    return Path(path)


def save_preview(folder: Path, seed: int) -> None:
    """preview.png and README.md, which explains it."""
    words = TEST_WORDS[:8]
    text = torch.stack(PromptEncoder(folder).encode([PROMPT.format(w) for w in words for _ in range(8)]))
    noise = torch.randn(64, 12, 64, generator=k2.generator(seed, "toy preview"))
    x0 = k2.sample(k2.load_dit(folder, dtype=torch.float32), noise, text, k2.sigmas(10, 12), GRID)
    pictures = ImageDecoder(folder).decode(x0, GRID).permute(0, 3, 1, 2) / 255
    torchvision.utils.save_image(pictures, folder / "preview.png", nrow=8, pad_value=0.5)
    about = "\n\n".join(__doc__.split("\n\n")[2:4])
    (folder / "README.md").write_text(
        f"# A toy Krea-2\n\nMade by tools/make_toy.py.\n\n{about}\n\npreview.png: eight samples a row of "
        f"{', '.join(words)}:\n10 Euler steps on the schedule of Krea-2-Raw, no guidance.\n")


def build(folder: Path, seed: int) -> None:
    """Trains everything and writes all files but the manifest into the empty `folder`."""
    torch.set_num_threads(1)        # sums in one order everywhere; the two trainings have a core each
    with multiprocessing.get_context("spawn").Pool(1, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        result = pool.apply_async(train_encoder, (folder, seed))    # beside the VAE: it takes as long
        vae = train_vae(seed).to(torch.bfloat16)
        text = dict(zip(WORDS, torch.from_numpy(result.get(timeout=900))))      # the process may have died
        pool.close()
        pool.join()     # it ends by itself and leaves no semaphore behind
    vae.save_pretrained(folder / "vae")
    dit = train_dit(folder, text, seed)
    save_pipeline(folder, vae, Qwen3VLModel.from_pretrained(folder / "text_encoder"), make_tokenizer(), dit)
    save_preview(folder, seed)


def main(out: Path, seed: int, force: bool) -> None:
    """Builds in a folder beside `out` and renames it: `out` is never half a toy. Two starts build once."""
    start, recipe = time.monotonic(), recipe_hash(seed)
    part = out.with_name(f".{out.name}.part")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))     # an exit that cleans up
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f".{out.name}.lock"), "w") as lock:
        print(f"building {out}, once no other start does so", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(out, seed, force):
            return
        try:
            shutil.rmtree(part, ignore_errors=True)     # of a build that was killed
            part.mkdir()
            build(part, seed)
            manifest = dict(recipe=recipe, seed=seed, files=checksums(part))
            (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            shutil.rmtree(out, ignore_errors=True)
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    print(f"built {out} in {time.monotonic() - start:.0f} s; preview.png shows what it draws")


if __name__ == "__main__":
    main(**parse_options())
