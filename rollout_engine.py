"""Rollout engines: prompt and seed in, image and everything that training needs out.

`RolloutEngine` is what the trainer drives. `TorchEngine` samples in the trainer's own process with the
trainer's own weights: it is handed a sampling function and adds what stands before and after it, the text
encoder and the VAE decoder of a pipeline folder in the diffusers layout. Nothing here imports the trainer.

    encoder = PromptEncoder(folder)             # text -> hidden states of 12 layers
    decoder = ImageDecoder(folder)              # x0 tokens -> pictures
    engine = TorchEngine(draw, encoder, decoder, grid=(2, 6))
    for sample in engine.generate([[Request('a sign that says "CAT"', seed=1)]], steps=10): ...

Dimension key: B batch, L text tokens, N image tokens, C latent channels, T sampling steps.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

PATCH = 2       # latent pixels on a side of one image token
VAE_SCALE = 8   # picture pixels on a side of one latent pixel


class EngineError(Exception):
    """A rollout that cannot be used; the message names the prompt and the seed."""


def read_json(path: str | Path, error: type[Exception] = ValueError) -> dict:
    """A JSON object from a file; raises `error` with one sentence that names the file."""
    try:
        value = json.loads(Path(path).read_text())
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise error(f"{path} is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


# ------------------------------------------------------------------------------------------------------------
# What goes in and what comes out
# ------------------------------------------------------------------------------------------------------------

@dataclass(slots=True, frozen=True)
class Request:
    """One image to make. `prompt_index` and `sample_index` are its place in the rollout; `spare` marks a
    request that only keeps this rank in step with the others and whose sample nobody wants."""
    prompt: str
    seed: int
    prompt_index: int = 0
    sample_index: int = 0
    spare: bool = False


@dataclass(slots=True)
class Sample:
    """One image and what training on it needs."""
    request: Request
    image: torch.Tensor     # (H, W, 3) uint8, CPU
    x0: torch.Tensor        # (N, 4 C) packed latents, the end of the trajectory
    text: torch.Tensor      # (L, taps, width) encoded prompt, no padding
    sigmas: torch.Tensor    # (T + 1,) fp32, the times that were sampled at, 1 to 0
    version: int            # of the policy that made it: rollouts it has been trained on


class RolloutEngine(Protocol):
    """Drawn upon by every rank alike, since a sharded model needs them all: `update_adapter` and `generate`
    are collective, with equally many units on each rank."""

    def wake(self) -> None: ...

    def update_adapter(self, version: int, gather: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Sample with this version of the policy from now on; `gather()` gives its adapter, whole tensors."""

    def generate(self, units: list[list[Request]], steps: int) -> Iterator[Sample]:
        """Yield a sample for each request as it is ready; the requests of a unit are sampled in one batch."""

    def sleep(self) -> None:
        """Give back the accelerator's memory until `wake`."""

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------------------
# Text: Krea-2's conditioning is a stack of hidden states of a Qwen3-VL, read through a fixed chat template
# ------------------------------------------------------------------------------------------------------------

TEMPLATE_BEFORE = ("<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
                   "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
                   "<|im_start|>user\n")
TEMPLATE_AFTER = "<|im_end|>\n<|im_start|>assistant\n"
TOKENS_BEFORE, TOKENS_AFTER = 34, 5     # their lengths: the first 34 rows are dropped, the last 5 are kept
DEFAULT_TAPS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)    # hidden_states indices; 0 = the embeddings


class PromptEncoder:
    """The text encoder and tokenizer of a pipeline folder."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32, max_text: int = 512, taps: tuple[int, ...] | None = None,
                 cache_mib: int = 256):
        """`max_text`: longest result in tokens; a longer prompt is cut. `cache_mib`: encoded prompts that are
        remembered, the last used ones. Raises ValueError when the tokenizer does not split the template into
        34 + 5 tokens."""
        from transformers import AutoTokenizer, Qwen3VLModel
        from transformers.utils import logging
        logging.disable_progress_bar()
        folder = Path(folder)
        index = folder / "model_index.json"
        if taps is None and index.is_file():
            taps = read_json(index).get("text_encoder_select_layers")
        self.taps = tuple(taps or DEFAULT_TAPS)
        self.device, self.max_text = torch.device(device), max_text
        self.known, self.free = OrderedDict(), cache_mib * 2**20    # prompt -> result; bytes left
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.model = Qwen3VLModel.from_pretrained(folder / "text_encoder", dtype=dtype).to(device).eval()
        self.after = self.tokenizer(TEMPLATE_AFTER).input_ids
        counts = (len(self.tokenizer(TEMPLATE_BEFORE).input_ids), len(self.after))
        if counts != (TOKENS_BEFORE, TOKENS_AFTER):
            raise ValueError(f"{folder / 'tokenizer'} splits the template into {counts} tokens, Krea-2 needs "
                             f"{(TOKENS_BEFORE, TOKENS_AFTER)}: it is another model's tokenizer")

    def refuse_long(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that `max_text` would cut: it might lose the words to write."""
        for prompt in prompts:
            tokens = len(self.tokenizer(prompt).input_ids) + TOKENS_AFTER
            if tokens > self.max_text:
                raise ValueError(f"the prompt {prompt!r} takes {tokens} tokens, more than --max-text "
                                 f"{self.max_text}: raise that, or shorten the prompt")

    def encode(self, prompts: list[str]) -> list[torch.Tensor]:
        """Each prompt -> (L, taps, width), L = its tokens + 5, at most `max_text`; on the encoder's device.

        Prompts are encoded one at a time without padding, so the result does not depend on their company; the
        rows equal the valid ones of the padded layout, whose positions count valid tokens only.
        """
        return [self._encode(p) for p in prompts]

    @torch.no_grad()
    def _encode(self, prompt: str) -> torch.Tensor:
        if prompt in self.known:
            self.known.move_to_end(prompt)
            return self.known[prompt]
        ids = self.tokenizer(TEMPLATE_BEFORE + prompt).input_ids
        ids = ids[:self.max_text + TOKENS_BEFORE - TOKENS_AFTER] + self.after
        states = self.model.to(self.device).language_model(     # which may have been moved off
            input_ids=torch.tensor([ids], device=self.device), output_hidden_states=True, use_cache=False
        ).hidden_states
        text = torch.stack([states[i][0, TOKENS_BEFORE:] for i in self.taps], dim=1)
        self.known[prompt] = text
        self.free -= text.nbytes
        while self.free < 0:
            self.free += self.known.popitem(last=False)[1].nbytes
        return text


# ------------------------------------------------------------------------------------------------------------
# Pictures
# ------------------------------------------------------------------------------------------------------------

def unpack(tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """(B, rows * columns, 4 C) -> (B, C, 2 rows, 2 columns): a token's channel c * 4 + py * 2 + px is pixel
    (py, px) of latent channel c."""
    x = tokens.unflatten(1, grid).unflatten(3, (-1, PATCH, PATCH))      # (B, rows, columns, C, py, px)
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class ImageDecoder:
    """The VAE decoder of a pipeline folder."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32):
        from diffusers import AutoencoderKLQwenImage    # a slow import, so not at the top
        # low_cpu_mem_usage would need the package accelerate, and its absence is told in five lines.
        vae = AutoencoderKLQwenImage.from_pretrained(Path(folder) / "vae", torch_dtype=dtype,
                                                     low_cpu_mem_usage=False)
        self.vae, self.device = vae.to(device).eval(), torch.device(device)
        shape = (1, -1, 1, 1, 1)
        self.mean = torch.tensor(self.vae.config.latents_mean, device=device).view(shape)
        self.std = torch.tensor(self.vae.config.latents_std, device=device).view(shape)

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """x0 tokens (B, N, 4 C) -> pictures (B, H, W, 3) uint8 on the CPU."""
        latents = unpack(tokens, grid)[:, :, None].float() * self.std + self.mean       # one frame
        vae = self.vae.to(self.device)      # which may have been moved off
        frames = vae.decode(latents.to(vae.dtype), return_dict=False)[0][:, :, 0]
        return ((frames.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


# ------------------------------------------------------------------------------------------------------------
# The engine in this process
# ------------------------------------------------------------------------------------------------------------

class TorchEngine:
    """Samples with the trainer's weights: no adapter of its own to update, nothing to put to sleep."""

    def __init__(self, draw: Callable[[list[torch.Tensor], list[int], int], tuple[torch.Tensor, ...]],
                 encoder: PromptEncoder, decoder: ImageDecoder, grid: tuple[int, int], offload: bool = False):
        """`draw(texts, seeds, steps)` -> x0 tokens (B, N, 4 C), sigmas (T + 1,); `grid`: of tokens;
        `offload`: asleep, the encoder and the decoder lie in host memory, until they are next used."""
        self.draw, self.encoder, self.decoder, self.grid, self.version = draw, encoder, decoder, grid, 0
        self.offload = offload

    def wake(self) -> None:
        pass

    def update_adapter(self, version: int, gather: Callable[[], dict[str, torch.Tensor]]) -> None:
        self.version = version      # the weights are already here: nothing to gather

    def generate(self, units: list[list[Request]], steps: int) -> Iterator[Sample]:
        """See RolloutEngine. Raises EngineError for a latent that is not finite."""
        for unit in units:
            texts = self.encoder.encode([r.prompt for r in unit])
            x0, sigmas = self.draw(texts, [r.seed for r in unit], steps)
            good = torch.isfinite(x0).flatten(1).all(1).tolist()
            if not all(good):
                bad = unit[good.index(False)]
                raise EngineError(f"the latent of {bad.prompt!r} (seed {bad.seed}) is not finite")
            images = self.decoder.decode(x0, self.grid)
            for i, request in enumerate(unit):
                yield Sample(request, images[i], x0[i], texts[i], sigmas, self.version)

    def sleep(self) -> None:
        if self.offload:
            self.encoder.model.to("cpu")
            self.decoder.vae.to("cpu")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def close(self) -> None:
        pass
