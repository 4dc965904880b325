"""Builds the toy: a tiny, genuine Krea-2 pipeline folder, trained from nothing on rendered words in about two minutes.

    python tools/make_toy.py [--out toy] [--seed 0] [--force]

The folder has the layout of diffusers' Krea2Pipeline, in bf16: a 4-layer Krea-2 transformer, a 36-layer Qwen3-VL text
encoder of width 32 with its tokenizer, a Qwen-Image VAE and the scheduler. It knows one prompt,
`a sign that says "CAT"`, words of three letters out of ABCEHMNPRT and pictures of 96 x 32 pixels.

Its captions are noisy on purpose: each letter was replaced by a random one with probability 0.4, as if it had been
read off by a careless person. So it draws crisp letters, often the wrong ones, which leaves reinforcement learning
something to do. The words of prompts_train.txt and prompts_test.txt occur neither in its captions nor its pictures.

A complete folder that this code made with these package versions and this seed is left alone. The trainer's model
code does not count: after a change in it that changes what the model computes, build again with --force.
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
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------

LETTERS = "ABCEHMNPRT"
TRAIN_WORDS = ("ACE ANT APE ARC ARM ATE BAR BEN BET CAN CAT EAR ERA HAT HER MAN MAT MET NET PAN PAT PER RAM RAT "
               "TAP TEN").split()
TEST_WORDS = ("ACT ART BAN BAT CAB CAP CAR EAT HAM HEN MAP MEN NAP PEN PET RAN RAP TAB TAN TAR TEA THE PAR "
              "APT").split()
HEIGHT, WIDTH, GRID = 32, 96, (2, 6)    # pixels, and image tokens of 16 x 16 pixels: a letter is two columns wide
CAPTION_NOISE = 0.4     # probability that a letter of a caption is replaced by a random one
WIDE = 32               # width of the text encoder
PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "pillow", "matplotlib")     # shape the result
MANIFEST = "toy.json"   # written last: a folder without it is not a finished toy


def prompt(word: str) -> str:
    return f'a sign that says "{word}"'


def pretraining_words() -> list[str]:
    """All words of three letters except those of the two prompt files."""
    words = {a + b + c for a in LETTERS for b in LETTERS for c in LETTERS}
    return sorted(words - set(TRAIN_WORDS) - set(TEST_WORDS))


# ------------------------------------------------------------------------------------------------------------
# Is it there already?
# ------------------------------------------------------------------------------------------------------------

def checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file but the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def recipe_hash(seed: int) -> str:
    """Of the seed, the versions of the packages, and this file without its comments and line breaks."""
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    code = ast.dump(ast.parse(Path(__file__).read_text()))
    return hashlib.sha256(json.dumps([seed, versions, code]).encode()).hexdigest()


def is_ready(out: Path, recipe: str, force: bool) -> bool:
    """Whether `out` holds this recipe's toy. Raises ValueError when it holds something that must not be replaced."""
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return False
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        made, files = manifest["recipe"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{out} is not a toy that this program built, so it is not replaced: name another --out "
                         "or move it away") from None
    found = checksums(out)
    if made == recipe and files.items() <= found.items() and not force:
        return True
    odd = sorted(name for name in files.keys() | found.keys() if files.get(name) != found.get(name))
    if odd and not force:
        raise ValueError(f"{out / odd[0]} is not as it was built: --force replaces the whole folder")
    return False


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "toy", help="folder to make [toy/ of the repository]")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw [0]")
    parser.add_argument("--force", action="store_true", help="build again although the folder is there and complete")
    return parser.parse_args()


def is_ready(options: argparse.Namespace) -> bool: ...


if __name__ == "__main__" and is_ready(options := parse_options()):
    sys.exit(0)     # before the imports below, which take seconds

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

# ------------------------------------------------------------------------------------------------------------
# Pictures of words, and how everything is trained
# ------------------------------------------------------------------------------------------------------------

def draw_words(words: list[str], gen):
    """Pictures (B, 3, HEIGHT, WIDTH) in -1..1: dark ink on a light ground, moved by up to 1.5 pixels both ways. Each
    letter is stretched to exactly two token columns, which makes spelling much easier to learn."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    font = ImageFont.truetype(str(file), 120)
    wide, high, margin = round(3 * font.getlength("A")), 4 * HEIGHT, 16     # of the word, in font pixels
    coverage = []
    for word, (right, down) in zip(words, (3 * torch.rand(len(words), 2, generator=gen) - 1.5).tolist()):
        canvas = Image.new("L", (wide + 2 * margin, high + 2 * margin))
        ImageDraw.Draw(canvas).text((margin + wide / 2, margin + high / 2), word, 255, font, anchor="mm")
        left, top = margin - right * wide / WIDTH, margin - down * high / HEIGHT
        box = (left, top, left + wide, top + high)
        coverage.append(np.asarray(canvas.resize((WIDTH, HEIGHT), Image.Resampling.BOX, box)))
    coverage = torch.from_numpy(np.stack(coverage))[:, None] / 255          # (B, 1, H, W)
    shade = torch.rand(2, len(words), 1, 1, 1, generator=gen)
    ground = torch.tensor([0.96, 0.94, 0.88]).view(3, 1, 1) + 0.04 * shade[0]
    ink = torch.tensor([0.08, 0.12, 0.30]).view(3, 1, 1) + 0.10 * shade[1]
    return 2 * (ground + (ink - ground) * coverage) - 1


def fit(name: str, model, loss_at: Callable, *, steps: int, lr: float, cosine: int = 0, warmup: int = 1,
        line: int = 0) -> None:
    """AdamW on loss_at(step). The rate rises over `warmup` steps and falls on a cosine that would reach 0 after
    `cosine` steps (0 = `steps`). A bar on terminal line `line`; where there is no terminal, one line at the end."""
    start = time.monotonic()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    for step in (bar := tqdm(range(steps), name, position=line, disable=None)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / (cosine or steps))) / 2
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    if bar.disable:
        print(f"{name}: {steps} steps, loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------------------
# The VAE
# ------------------------------------------------------------------------------------------------------------

def on_frame(conv, x):
    """A causal 3D convolution of a single frame (B, C, 1, H, W): the frames before it are padding, so only the last
    temporal slice of the kernel meets data, and a 2D convolution with it is the same and much faster."""
    padding = (conv._padding[2], conv._padding[0])
    return conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=padding)[:, :, None]


def new_vae():

    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=0,
                                  temperal_downsample=[False, True, True], latents_mean=[0.0] * 16,
                                  latents_std=[1.0] * 16)


def train_vae(seed: int):
    """A VAE trained on single frames: L1 plus a weak KL term. Its config holds mean and std of its latents."""
    torch.manual_seed(k2.seed_for(seed, "toy vae"))
    gen = k2.generator(seed, "toy vae pictures")
    pictures = draw_words(pretraining_words(), gen)[:, :, None]         # (words, 3, 1 frame, H, W)
    vae = new_vae()
    convs = [m for name, m in vae.named_modules() if isinstance(m, QwenImageCausalConv3d) and "time_conv" not in name]
    for conv in convs:
        conv.forward = functools.partial(on_frame, conv)

    def encode(x):
        return DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(x)))

    def loss_at(step: int):
        x = pictures[torch.randint(len(pictures), (4,), generator=gen)]
        latent = encode(x)
        y = vae.decoder(vae.post_quant_conv(latent.sample(gen)))
        kl = 0.5 * (latent.mean.square() + latent.var - 1 - latent.logvar).mean()
        return (y - x).abs().mean() + 1e-3 * kl

    fit("VAE", vae, loss_at, steps=600, lr=5e-3)
    with torch.no_grad():
        std, mean = torch.std_mean(encode(pictures).mean, dim=(0, 2, 3, 4))
        for conv in convs:
            del conv.forward
            conv.weight[:, :, :-1] = 0      # untrained, and never to be used
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


# ------------------------------------------------------------------------------------------------------------
# The tokenizer and the text encoder
# ------------------------------------------------------------------------------------------------------------

def make_tokenizer():
    """A byte-level BPE trained on the chat template and the prompt: their words become single tokens, so that the
    template has the 34 + 5 tokens that Krea-2 programs count on, and the letters of a word in quotes stay apart."""
    special = [f"<|{name}|>" for name in "im_start im_end vision_start vision_end image_pad video_pad".split()]
    text = TEMPLATE_BEFORE + TEMPLATE_AFTER
    for token in special:
        text = text.replace(token, "\0")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1000, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator([*text.split("\0"), prompt("")], trainer)
    learned = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]],
                          pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=4096,
                          extra_special_tokens=special)


def new_encoder(tokenizer, seed: int, layers: int = 36):
    """A random Qwen3-VL, matrices of std 1 / sqrt(fan in). From layer 2 on, what a layer adds is small, so that all
    the states that the transformer reads carry what the first two layers wrote."""
    text = dict(vocab_size=len(tokenizer), hidden_size=WIDE, intermediate_size=64, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
                tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[4, 2, 2],
                                     mrope_interleaved=True))
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, num_position_embeddings=16,
                  out_hidden_size=WIDE, deepstack_visual_indexes=[0])
    image, video, start, end = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    torch.manual_seed(k2.seed_for(seed, "toy encoder", layers))
    model = Qwen3VLModel(Qwen3VLConfig(text, vision, tie_word_embeddings=True, image_token_id=image,
                                       video_token_id=video, vision_start_token_id=start, vision_end_token_id=end))
    with torch.no_grad():
        torch.nn.init.normal_(model.language_model.embed_tokens.weight)
        for i, layer in enumerate(model.language_model.layers):
            for name, weight in layer.named_parameters():
                if weight.ndim == 2:
                    small = 0.1 if i >= 2 and name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    torch.nn.init.normal_(weight, std=small * weight.shape[1] ** -0.5)
    return model.eval()


def train_encoder(folder: Path, seed: int) -> None:
    """Leaves tokenizer/ and text_encoder/ in `folder`; run in a process of its own beside the VAE's training.

    The first two layers of the encoder learn to write code[letter] + code[place] at each letter of a word; the others
    stay random. A random encoder also tells letters and places apart, but the transformer fails to read it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's business: it ends this process

    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = new_encoder(tokenizer, seed)
    gen = k2.generator(seed, "toy encoder words")
    lower = new_encoder(tokenizer, seed, layers=2).language_model
    for layer in lower.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.5)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 1.5)
    lower.norm.weight.requires_grad_(False)             # ones: the output is the normalised state

    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    codes = torch.randn(len(LETTERS), WIDE, generator=gen) / math.sqrt(2)
    places = torch.randn(5, WIDE, generator=gen) / math.sqrt(2)
    before, after = (torch.tensor(tokenizer(part).input_ids).expand(64, -1)
                     for part in (TEMPLATE_BEFORE + prompt("\0") + TEMPLATE_AFTER).split("\0"))

    def loss_at(step: int):
        n = 2 + step % 4                                # letters in this batch's words
        word = torch.randint(len(LETTERS), (64, n), generator=gen)
        state = lower(input_ids=torch.cat([before, letters[word], after], dim=1)).last_hidden_state
        return (state[:, before.shape[1]:-after.shape[1]] - codes[word] - places[:n]).square().mean()

    fit("text encoder", lower, loss_at, steps=400, lr=3e-3, line=1)
    model.language_model.load_state_dict(lower.state_dict(), strict=False)
    tokenizer.save_pretrained(folder / "tokenizer")
    model.to(torch.bfloat16).save_pretrained(folder / "text_encoder")


# ------------------------------------------------------------------------------------------------------------
# The transformer
# ------------------------------------------------------------------------------------------------------------

def new_dit(seed: int):
    """A transformer that starts as nearly the identity: no output, open gates, small steps of the residual stream."""
    torch.manual_seed(k2.seed_for(seed, "toy transformer"))
    model = k2.Krea2DiT(k2.Krea2Config(
        num_layers=4, attention_head_dim=32, num_attention_heads=6, num_key_value_heads=2, intermediate_size=512,
        timestep_embed_dim=64, text_hidden_dim=WIDE, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=128, axes_dims_rope=(8, 12, 12)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("to_out.0.weight", "ff.down.weight")):
                init.normal_(weight, std=0.014)
            elif name.endswith("projector.weight"):
                init.constant_(weight, 1 / model.config.num_text_layers)
            elif name.startswith("time_mod_proj") and weight.ndim == 2:
                init.normal_(weight, std=0.02)
            elif name.startswith("final_layer.linear") or name.endswith("bias"):
                init.zeros_(weight)
            elif name.endswith("scale_shift_table") and len(weight) == 6:
                init.zeros_(weight)
                weight[[2, 5]] = 1.0        # the two gates
            elif weight.ndim == 2 and not name.endswith("scale_shift_table"):
                init.xavier_uniform_(weight)
    return model


def train_dit(folder: Path, seed: int):
    """Rectified-flow pretraining on (noisy caption, picture) pairs, with the VAE and the text encoder in `folder`."""
    words = pretraining_words()
    text = dict(zip(words, PromptEncoder(folder).encode([prompt(word) for word in words])))
    shown = 4 * words                       # the word of each picture
    gen = k2.generator(seed, "toy pretraining")
    captioner = random.Random(k2.seed_for(seed, "toy captions"))
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae")
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        pictures = draw_words(shown, gen)[:, :, None].split(64)
        latents = torch.cat([vae.encode(part).latent_dist.mean[:, :, 0] for part in pictures])
    tokens = k2.pack((latents - mean) / std)

    def caption(word: str) -> str:
        """`word` with letters replaced at random, but never one of the prompt files' words."""
        while True:
            noisy = "".join(captioner.choice(LETTERS) if captioner.random() < CAPTION_NOISE else c for c in word)
            if noisy in text:
                return noisy

    def loss_at(step: int):
        average.update_parameters(model)    # with what the step before has made
        batch = torch.randint(len(shown), (64,), generator=gen)
        said = torch.stack([text[caption(shown[i])] for i in batch])
        x0 = tokens[batch]
        t = k2.logit_normal_times(64, 2.0, gen)
        eps = torch.randn(x0.shape, generator=gen)
        return k2.rectified_flow_loss(model, x0, said, t, eps, GRID).mean()

    model = new_dit(seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    # Stopped well before the cosine's end: it then still spells badly, and large steps are what makes letters crisp.
    fit("transformer", model, loss_at, steps=300, lr=3e-3, cosine=500, warmup=50)
    return average.module


# ------------------------------------------------------------------------------------------------------------
# The folder
# ------------------------------------------------------------------------------------------------------------

CARD = """# A toy Krea-2

A throw-away text-to-image model in the format of Krea-2, for trying out reinforcement learning on a CPU. It was made by
tools/make_toy.py from nothing but rendered words; it contains no weights of Krea-2, Qwen or anybody else.

It draws three-letter words on signs of 96 x 32 pixels from the prompt `a sign that says "CAT"`, letters ABCEHMNPRT only.
Its captions were noisy on purpose (each letter replaced by a random one with probability 0.4), so it writes crisp letters
but often the wrong ones. The words in prompts_train.txt and prompts_test.txt were never shown to it.

preview.png: ten words of prompts_test.txt, a row each. Left: drawn by a font, then passed through the VAE; the others:
samples of the model, 10 Euler steps on the schedule of Krea-2-Raw, no guidance.
"""

def save_pipeline(folder: Path, vae, text_encoder, tokenizer, dit) -> None:
    """The five parts and model_index.json in bf16, as diffusers writes them, and the two prompt files."""
    diffusers_logging.set_verbosity_error()     # it advises against norms in bf16; whoever loads them upcasts them
    logging.disable_progress_bar()
    c = dit.config
    transformer = Krea2Transformer2DModel(**dataclasses.asdict(c))
    transformer.load_state_dict(dit.state_dict())
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                                                base_image_seq_len=256, max_image_seq_len=6400)
    pipeline = Krea2Pipeline(scheduler, vae, text_encoder, tokenizer, transformer, is_distilled=False, patch_size=2,
                             text_encoder_select_layers=DEFAULT_TAPS)
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    # The same sizes under the names of Krea's own release, which is what sglang reads; load_dit checks that they agree.
    official = dict(features=c.width, tdim=c.timestep_embed_dim, txtdim=c.text_hidden_dim,
                    heads=c.num_attention_heads, kvheads=c.num_key_value_heads, multiplier=4, layers=c.num_layers,
                    patch=2, channels=c.in_channels // 4, theta=c.rope_theta, txtlayers=c.num_text_layers,
                    txtheads=c.text_num_attention_heads, txtkvheads=c.text_num_key_value_heads,
                    axes_dims=c.axes_dims_rope)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | official, indent=2) + "\n")
    for name, words in (("train", TRAIN_WORDS), ("test", TEST_WORDS)):
        (folder / f"prompts_{name}.txt").write_text("".join(prompt(word) + "\n" for word in words))


def tiny_folder(path: str | Path, seed: int = 0) -> Path:
    """A random, untrained pipeline folder of the toy's layout and sizes, made in seconds: for tests. Returns it."""
    dit, tokenizer = new_dit(seed), make_tokenizer()
    torch.manual_seed(k2.seed_for(seed, "tiny folder"))
    torch.nn.init.normal_(dit.final_layer.linear.weight, std=0.05)      # or its velocity would be 0 everywhere
    save_pipeline(Path(path), new_vae(), new_encoder(tokenizer, seed), tokenizer, dit)
    return Path(path)


def save_preview(folder: Path, seed: int, words: int = 10, samples: int = 8) -> None:
    """preview.png, see CARD."""
    shown = TEST_WORDS[:words]
    text = torch.stack(PromptEncoder(folder).encode([prompt(w) for w in shown])).repeat_interleave(samples, 0)
    noise = torch.cat([k2.initial_noise(k2.seed_for(seed, "toy preview", i), GRID, 64, torch.float32)
                       for i in range(len(text))])
    dit = k2.load_dit(folder, dtype=torch.float32)
    decoder = ImageDecoder(folder)
    drawn = draw_words(shown, k2.generator(seed, "toy preview"))[:, :, None]
    with torch.no_grad():
        latents = decoder.vae.encode(drawn).latent_dist.mean
    drawn = k2.pack(((latents - decoder.mean) / decoder.std)[:, :, 0])
    drawn = drawn.unflatten(0, (words, 1))
    sampled = k2.sample(dit, noise, text, k2.sigmas(10, GRID[0] * GRID[1]), GRID).unflatten(0, (words, samples))
    pictures = decoder.decode(torch.cat([drawn, sampled], 1).flatten(0, 1), GRID)
    pictures = torch.nn.functional.pad(pictures, (0, 0, 2, 2, 2, 2), value=128).unflatten(0, (words, 1 + samples))
    Image.fromarray(pictures.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1).numpy()).save(folder / "preview.png")


def build(folder: Path, seed: int) -> None:
    """Trains everything and writes all files but the manifest into the empty `folder`."""
    torch.set_num_threads(1)        # the same bytes on any machine of one kind; the two trainings share two cores
    encoder = multiprocessing.get_context("spawn").Process(target=train_encoder, args=(folder, seed))
    encoder.start()
    try:
        vae = train_vae(seed)
        encoder.join()
    finally:
        encoder.kill()
    if encoder.exitcode != 0:
        raise RuntimeError(f"training the text encoder failed with exit status {encoder.exitcode}; see above")
    parts = (vae, Qwen3VLModel.from_pretrained(folder / "text_encoder"),
             AutoTokenizer.from_pretrained(folder / "tokenizer"))
    save_pipeline(folder, *parts, new_dit(seed))
    save_pipeline(folder, *parts, train_dit(folder, seed))
    save_preview(folder, seed)
    (folder / "README.md").write_text(CARD)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "toy", help="folder to make [toy/ of the repository]")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw [0]")
    parser.add_argument("--force", action="store_true", help="build again although the folder is there and complete")
    options = parser.parse_args()
    out, start = options.out.resolve(), time.monotonic()
    part, old, recipe = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.old"), recipe_hash(options.seed)
    try:
        ...
