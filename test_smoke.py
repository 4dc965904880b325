"""The tests, in the order of the code: model, weights, adapters, flow, loss, text, reward, loop, toy.

    ./launch.sh test                 all of them, on a CPU
    ./launch.sh test -k reward       some of them; options are pytest's

Peers are used live: diffusers for the model, the pipeline and the adapter file, EasyOCR for the reward,
torchrun with gloo for the ranks. Tests marked `with_fixtures` compare with stored outputs of two reference
implementations in ../shared/fixtures and exist only where that folder does.
"""

import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from safetensors.torch import load_file, save_file

import nft_krea2 as nft
import ocr_reward
from nft_krea2 import UsageError, load_dit, use_adapter
from ocr_reward import OCRError, OCRResult, OCRReward, target_spans, target_text, text_similarity
from rollout_engine import EngineError, ImageDecoder, PromptEncoder, Request, Sample, TorchEngine, unpack

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent
SHARED = ROOT.parent / "shared" / "fixtures"


def with_fixtures(test):
    """Leaves a test out of the module, rather than skipping it, where the reference files are absent."""
    return test if SHARED.is_dir() else None


@functools.cache
def fixture(name: str) -> dict:
    path = SHARED / name
    return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def assert_close(got: torch.Tensor, want: torch.Tensor, limit: float, relative: bool = False) -> None:
    """Same shape and max |got - want| <= limit, or limit * max |want|; not satisfied by NaN."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    scale = want.double().abs().max().item() if relative else 1.0
    assert error <= limit * scale, f"max abs difference {error:.3g}, limit {limit:g} x {scale:.3g}"


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------
# Tiny models
# ----------------------------------------------------------------------------------------------------------

TINY = {
    "wide": dict(in_channels=64, num_layers=2, attention_head_dim=16, num_attention_heads=6,
                 num_key_value_heads=2, intermediate_size=40, timestep_embed_dim=16, text_hidden_dim=24,
                 num_text_layers=4, text_num_attention_heads=3, text_num_key_value_heads=1,
                 text_intermediate_size=36, num_layerwise_text_blocks=1, num_refiner_text_blocks=2,
                 axes_dims_rope=(4, 6, 6),
                 rope_theta=1000.0, norm_eps=1e-5),
    "no groups": dict(in_channels=16, num_layers=3, attention_head_dim=8, num_attention_heads=4,
                      num_key_value_heads=4, intermediate_size=56, timestep_embed_dim=32, text_hidden_dim=16,
                      num_text_layers=2, text_num_attention_heads=4, text_num_key_value_heads=4,
                      text_intermediate_size=20, num_layerwise_text_blocks=2, num_refiner_text_blocks=1,
                      axes_dims_rope=(4, 2, 2), rope_theta=300.0, norm_eps=1e-3),
    "one kv head": dict(in_channels=32, num_layers=1, attention_head_dim=32, num_attention_heads=2,
                        num_key_value_heads=1, intermediate_size=96, timestep_embed_dim=8, text_hidden_dim=32,
                        num_text_layers=5, text_num_attention_heads=4, text_num_key_value_heads=2,
                        text_intermediate_size=64, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
                        axes_dims_rope=(8, 12, 12), rope_theta=1000.0, norm_eps=1e-5),
}
MASKS = {   # two rows of six text tokens
    "none": None,
    "end": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool),
    "middle": torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1]], dtype=torch.bool),
}


def tiny_models(name: str = "wide") -> tuple[nft.Krea2DiT, Krea2Transformer2DModel]:
    """Our model and diffusers' with the same random weights; no weight keeps its initial zero."""
    theirs = Krea2Transformer2DModel(**TINY[name]).eval()
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            is_linear = p.ndim == 2 and p.shape[0] not in (2, 6)      # the modulation tables have 2 or 6 rows
            p.copy_(draw(i, *p.shape) * (p.shape[-1] ** -0.5 if is_linear else 0.3))
    ours = nft.Krea2DiT(nft.Krea2Config(**TINY[name])).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tiny_dit(name: str = "wide") -> nft.Krea2DiT:
    return tiny_models(name)[0].requires_grad_(False)


def tiny_inputs(name: str = "wide", grid: tuple[int, int] = (2, 3)) -> tuple[torch.Tensor, ...]:
    """img (2, N, channels), text (2, 6, taps, width), t (2,)."""
    c = TINY[name]
    return (draw(101, 2, grid[0] * grid[1], c["in_channels"]),
            draw(102, 2, 6, c["num_text_layers"], c["text_hidden_dim"]), torch.tensor([0.87, 0.23]))


def position_ids(text_rows: int, grid: tuple[int, int]) -> torch.Tensor:
    rows = [(0, 0, 0)] * text_rows + [(0, i, j) for i in range(grid[0]) for j in range(grid[1])]
    return torch.tensor(rows, dtype=torch.float32)


def diffusers_velocity(model, img, text, t, mask, grid) -> torch.Tensor:
    return model(hidden_states=img, encoder_hidden_states=text, timestep=t, encoder_attention_mask=mask,
                 position_ids=position_ids(text.shape[1], grid), return_dict=False)[0]


def diffusers_pipeline(model: Krea2Transformer2DModel) -> Krea2Pipeline:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                                                base_image_seq_len=256, max_image_seq_len=6400)
    pipe = Krea2Pipeline(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def parameter_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


# ----------------------------------------------------------------------------------------------------------
# The DiT against diffusers, live
# ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name, grid", [("wide", (2, 3)), ("no groups", (3, 5)), ("one kv head", (4, 1))])
def test_velocity_equals_diffusers(name, grid, mask):
    ours, theirs = tiny_models(name)
    img, text, t = tiny_inputs(name, grid)
    with torch.no_grad():
        got = ours(img, text, t, text_mask=MASKS[mask], grid=grid)
        want = diffusers_velocity(theirs, img, text, t, MASKS[mask], grid)
    assert want.std() > 0.1
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("name, grid, mask", [("wide", (2, 3), "middle"), ("no groups", (3, 2), "end"),
                                              ("one kv head", (1, 4), "none")])
def test_all_gradients_equal_diffusers(name, grid, mask):
    ours, theirs = tiny_models(name)
    img, text, t = tiny_inputs(name, grid)
    weight, grads = draw(7, *img.shape), []
    for model, run in ((ours, lambda *x: ours(*x, text_mask=MASKS[mask], grid=grid)),
                       (theirs, lambda *x: diffusers_velocity(theirs, *x, MASKS[mask], grid))):
        a, b = img.clone().requires_grad_(), text.clone().requires_grad_()
        (run(a, b, t) * weight).sum().backward()
        grads.append(parameter_gradients(model) | {"img": a.grad, "text": b.grad})
    assert grads[0].keys() == grads[1].keys() == dict(ours.named_parameters()).keys() | {"img", "text"}
    for key, want in grads[1].items():
        assert want.abs().max() > 0, key
        assert_close(grads[0][key], want, 5e-5, relative=True)


def test_masked_text_has_no_effect_on_the_velocity():
    model, (img, text, t) = tiny_dit(), tiny_inputs()
    other = torch.where(MASKS["middle"][:, :, None, None], text, 100.0)
    first, second = (model(img, x, t, text_mask=MASKS["middle"], grid=(2, 3)) for x in (text, other))
    assert_close(first, second, 1e-6)
    assert (model(img, other, t, grid=(2, 3)) - first).abs().max() > 1e-2


def test_recompute_gives_identical_outputs_and_gradients():
    img, text, t = tiny_inputs()
    outs, grads, calls = [], [], []
    for recompute in ("none", "full"):
        model, _ = tiny_models()
        model.recompute = recompute
        model.transformer_blocks[0].register_forward_pre_hook(lambda *_: calls.append(recompute))
        out = model(img, text, t, text_mask=MASKS["end"], grid=(2, 3))
        (out * draw(7, *img.shape)).sum().backward()
        outs.append(out)
        grads.append(parameter_gradients(model))
    assert calls == ["none", "full", "full"]
    assert torch.equal(outs[0], outs[1]) and grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][k], grads[1][k]) for k in grads[0])


def test_a_bf16_model_keeps_its_times_in_fp32():
    embed, t = tiny_dit().time_embed, torch.tensor([0.9])       # in bf16 1000 t would be 898.4
    want = embed(t, torch.float32)
    rounded = (embed(t.bfloat16(), torch.float32) - want).abs().max()
    got = copy.deepcopy(embed).bfloat16()(t, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and (got.float() - want).abs().max() < 0.2 * rounded


def test_a_grid_that_the_tokens_do_not_fill_is_refused():
    img, text, t = tiny_inputs()
    with pytest.raises(ValueError, match="6 image tokens do not fill a grid of 2 x 4"):
        tiny_dit()(img, text, t, grid=(2, 4))
    with pytest.raises(ValueError, match="text"):
        tiny_dit()(img, text[:1], t, grid=(2, 3))


@pytest.mark.parametrize("change, word", [
    (dict(axes_dims_rope=(4, 6, 4)), "axes_dims_rope"), (dict(num_key_value_heads=4), "num_key_value_heads"),
    (dict(text_num_key_value_heads=2), "text_num_attention_heads"),
    (dict(text_hidden_dim=25), "text_hidden_dim"),
    (dict(num_layers=0), "num_layers"), (dict(intermediate_size="40"), "intermediate_size")])
def test_impossible_sizes_are_refused_by_name(change, word):
    with pytest.raises(UsageError, match=word):
        nft.Krea2Config(**TINY["wide"] | change)


# ----------------------------------------------------------------------------------------------------------
# The DiT against both references, stored
# ----------------------------------------------------------------------------------------------------------

NAMINGS = {   # keys of dit_tiny.json whose entries make up the config.json, and the weights under those names
    "diffusers": (("config_diffusers",), "dit_tiny.safetensors"),
    "official": (("config_official",), "dit_tiny_official.safetensors"),
    "both": (("config_diffusers", "config_official"), "dit_tiny_official.safetensors"),
}
CASES = [("a", 0), ("a", 1), ("a", 2), ("b", None), ("b_mid", None), ("c", None), ("d", None)]


def write_reference(folder: Path, naming: str = "diffusers") -> Path:
    """A transformer folder with the reference weights."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, weights = NAMINGS[naming]
    config = {k: v for key in keys for k, v in fixture("dit_tiny.json")[key].items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(fixture(weights), folder / "diffusion_pytorch_model.safetensors")
    return folder


@functools.cache
def reference_case(case: str, index: int | None) -> dict:
    """Inputs of our forward and the outputs of both references (the official one where it was run)."""
    io = fixture("dit_io.safetensors")
    pick = (lambda x: x) if index is None else (lambda x: x[index])
    t = io[f"{case}.t"] if index is None else io[f"{case}.t"][index:index + 1]
    return dict(inputs=(io[f"{case}.hidden_states"], io[f"{case}.encoder_hidden_states"], t),
                keywords=dict(text_mask=io[f"{case}.mask"], grid=(*fixture("dit_io.json")["grids"][case],)),
                wanted=[pick(io[k]) for k in (f"{case}.out_diffusers", f"{case}.out_official") if k in io])


@with_fixtures
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("case, index", CASES)
def test_velocity_equals_both_references(tmp_path, naming, case, index):
    model, ref = load_dit(write_reference(tmp_path, naming)), reference_case(case, index)
    assert len(ref["wanted"]) == (1 if case == "d" else 2)
    got = model(*ref["inputs"], **ref["keywords"])
    for want in ref["wanted"]:
        assert_close(got, want, 2e-5)


@with_fixtures
def test_no_mask_means_that_all_text_is_valid(tmp_path):
    ref = reference_case("a", 1)
    got = load_dit(write_reference(tmp_path))(*ref["inputs"], grid=ref["keywords"]["grid"])
    assert_close(got, ref["wanted"][0], 2e-5)


@with_fixtures
def test_gradients_equal_the_reference(tmp_path):
    model = load_dit(write_reference(tmp_path)).requires_grad_(True)
    ref, stored = reference_case("a", 1), fixture("dit_grads.safetensors")
    img, text, t = ref["inputs"]
    img, text = img.clone().requires_grad_(), text.clone().requires_grad_()
    (model(img, text, t, **ref["keywords"]) * stored["loss_weight"]).sum().backward()
    got = {f"grad.{k}": v for k, v in parameter_gradients(model).items()}
    got |= {"grad_input.hidden_states": img.grad, "grad_input.encoder_hidden_states": text.grad}
    for key in (k for k in stored if k.startswith("grad")):
        assert_close(got[key], stored[key], 5e-5, relative=True)


@with_fixtures
@pytest.mark.parametrize("case, index", CASES)
def test_bf16_stays_near_fp32(tmp_path, case, index):
    model, ref = load_dit(write_reference(tmp_path), dtype=torch.bfloat16), reference_case(case, index)
    assert model.dtype == torch.bfloat16 and model.final_layer.norm.weight.dtype == torch.float32
    got, want = model(*ref["inputs"], **ref["keywords"]), ref["wanted"][0]
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt() <= 0.03


# ----------------------------------------------------------------------------------------------------------
# Weights in
# ----------------------------------------------------------------------------------------------------------

def write_tiny(folder: Path, change=lambda tensors: None, config: dict | None = None) -> Path:
    """A transformer folder with the weights of tiny_dit(), after `change` has had its way with them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.clone() for k, v in tiny_dit().state_dict().items()}
    change(tensors)
    (folder / "config.json").write_text(json.dumps(TINY["wide"] | (config or {})))
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return folder


def shard_in_two(folder: Path) -> tuple[Path, Path]:
    """Splits the folder's one file in two with an index, as large checkpoints come."""
    whole = folder / "diffusion_pytorch_model.safetensors"
    shards = (folder / "part-1-of-2.safetensors", folder / "part-2-of-2.safetensors")
    halves = [dict(list(load_file(whole).items())[i::2]) for i in (0, 1)]
    for shard, half in zip(shards, halves):
        save_file(half, shard)
    weight_map = {k: shard.name for shard, half in zip(shards, halves) for k in half}
    (folder / f"{whole.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole.unlink()
    return shards


def assert_is_tiny(model: nft.Krea2DiT) -> None:
    want = tiny_dit().state_dict()
    assert model.state_dict().keys() == want.keys()
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_load_dit_takes_a_pipeline_folder_a_transformer_folder_and_a_file(tmp_path):
    folder = write_tiny(tmp_path / "pipe" / "transformer")
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    for path in (tmp_path / "pipe", folder, folder / "diffusion_pytorch_model.safetensors", str(folder)):
        assert_is_tiny(load_dit(path))


def test_load_dit_takes_shards(tmp_path):
    shard_in_two(write_tiny(tmp_path / "transformer"))
    assert_is_tiny(load_dit(tmp_path))


def test_load_dit_keeps_the_dtype_of_the_file_unless_told(tmp_path):
    write_tiny(tmp_path, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    assert {p.dtype for p in load_dit(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_dit(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_a_diffusers_checkpoint_folder_loads(tmp_path):
    theirs = tiny_models()[1]
    theirs.save_pretrained(tmp_path / "transformer")
    assert_is_tiny(load_dit(tmp_path))


SPOILT = {   # what happens to the tensors, what the message must hold
    "missing": (lambda t: t.pop("transformer_blocks.1.ff.up.weight"),
                "missing transformer_blocks.1.ff.up.weight"),
    "extra": (lambda t: t.update({"transformer_blocks.9.ff.up.weight": torch.ones(1)}),
              "extra transformer_blocks.9.ff.up.weight"),
    "extra under an official prefix": (lambda t: t.update({"blocks.0.attn.wz.weight": torch.ones(1)}),
                                       "extra blocks.0.attn.wz.weight"),
    "misshapen": (lambda t: t.update({"img_in.weight": t["img_in.weight"].T.contiguous()}),
                  r"img_in.weight has shape \(64, 96\), the config says \(96, 64\)"),
    "misshapen table": (lambda t: t.update({"final_layer.scale_shift_table": torch.ones(3, 96)}),
                        "final_layer.scale_shift_table has shape"),
    "integers": (lambda t: t.update({"img_in.bias": t["img_in.bias"].to(torch.int8)}),
                 "img_in.bias is I8, not one of"),
    "under both names": (lambda t: t.update({"first.bias": t["img_in.bias"].clone()}), "twice"),
    "more than five": (lambda t: [t.pop(k) for k in list(t)[:7]], "and 2 more"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, what):
    change, message = SPOILT[what]
    with pytest.raises(UsageError, match=message):
        load_dit(write_tiny(tmp_path, change))


def test_a_config_key_that_nothing_uses_is_refused_by_name(tmp_path):
    assert_is_tiny(load_dit(write_tiny(tmp_path, config={"_class_name": "Krea2Transformer2DModel"})))
    with pytest.raises(UsageError, match="unknown key 'num_experts'"):
        load_dit(write_tiny(tmp_path, config={"num_experts": 4}))


def test_two_namings_that_disagree_are_refused():
    official = dict(features=96, heads=6, kvheads=2, layers=2)
    with pytest.raises(UsageError, match="intermediate_size is 40 by its own name, but 256"):
        nft.Krea2Config.from_json(TINY["wide"] | official)
    with pytest.raises(UsageError, match="kvheads, layers missing"):
        nft.Krea2Config.from_json({"features": 96, "heads": 6})


def official_names(tensors: dict[str, torch.Tensor]) -> None:
    """Renames our tensors to the official scheme, with its flat tables; tests have them from nowhere else."""
    names = {v: k for k, v in nft._OFFICIAL_TOP.items()}
    parts = {v: k for k, v in nft._OFFICIAL_PARTS.items()}
    for name in list(tensors):
        module, _, kind = name.rpartition(".")
        value, words = tensors.pop(name), module.split(".")
        if name.endswith("scale_shift_table"):
            new = "last.modulation.lin" if words[0] == "final_layer" else f"blocks.{words[1]}.mod.lin"
            value = value if words[0] == "final_layer" else value.flatten()
        elif module in names:
            new = f"{names[module]}.{kind}"
        elif module == "text_fusion.projector":
            new = "txtfusion.projector.weight"
        else:
            stem = "blocks" if words[0] == "transformer_blocks" else f"txtfusion.{words[1]}"
            rest = words[2:] if stem.startswith("txt") else words[1:]
            new = ".".join([stem, rest[0], parts[".".join(rest[1:])], kind])
        tensors[new.replace("norm.weight", "norm.scale")] = value


RANKS_LOAD = """
import sys, torch, nft_krea2 as k2
c = k2.Config(device="cpu", world=int(sys.argv[2]))
k2.start_processes(c)
model = k2.load_dit(sys.argv[1], prepare=lambda m: (k2.add_lora(m, rank=2), k2.shard(m)))
k2.reset_lora(model, 7)
state = {k: k2.whole(v) for k, v in model.state_dict().items()}     # collective
assert k2.local(model.img_in.weight).numel() < model.img_in.weight.numel()
if torch.distributed.get_rank() == 0:
    torch.save(state, sys.argv[3])
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("ranks, change", [(2, official_names), (3, lambda tensors: None)])
def test_ranks_read_their_own_rows_of_either_naming(tmp_path, ranks, change):
    """96 rows do not divide by three blocks of 33, so that the last rank's part is short."""
    (tmp_path / "load.py").write_text(RANKS_LOAD)
    folder, out = write_tiny(tmp_path / "model", change), tmp_path / "whole.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    subprocess.run([*torchrun, tmp_path / "load.py", folder, str(ranks), out], check=True, timeout=120,
                   env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    alone = tiny_dit()
    nft.add_lora(alone, rank=2, seed=7)
    got, want = torch.load(out), alone.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def test_loading_costs_a_rank_its_shard_and_little_time(tmp_path):
    """The benchmark at half a GB: no second copy; the margins are above what a busy machine showed."""
    subprocess.run([sys.executable, ROOT / "tools" / "bench.py", "load", "--gb", "0.5", "--ranks", "1,2",
                    "--repeats", "3", "--out", tmp_path / "out.json"], check=True, timeout=300)
    figures = json.loads((tmp_path / "out.json").read_text())["load"]
    for ranks, memory in figures["memory"].items():
        assert memory["shard"] == pytest.approx(figures["gib"] / int(ranks), rel=0.02)
        assert memory["rise"] < memory["shard"] + 0.25 and memory["peak"] < memory["shard"] + 0.95
    assert figures["ratio"] < 2


def test_names_and_sizes_of_the_12b_model_equal_diffusers():
    with torch.device("meta"):
        ours, theirs = nft.Krea2DiT(nft.Krea2Config()), Krea2Transformer2DModel()
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert sum(p.numel() for p in ours.parameters()) == 12_820_073_036


def test_official_sizes_give_krea_2():
    """The published config of the 12B model in the official names is the default of Krea2Config."""
    official = dict(features=6144, tdim=256, txtdim=2560, heads=48, kvheads=12, multiplier=4, layers=28,
                    patch=2, channels=16, bias=False, theta=1000.0, txtlayers=12, txtheads=20, txtkvheads=20)
    assert nft.Krea2Config.from_json(official) == nft.Krea2Config()


@pytest.mark.parametrize("bytes_left", [0, 100, 30_000])
def test_a_truncated_file_is_refused_by_name(tmp_path, bytes_left):
    file = write_tiny(tmp_path) / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(UsageError, match="pytorch_model.safetensors cannot be read.*download it again"):
        load_dit(tmp_path)


def test_a_checkpoint_with_a_part_missing_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="nowhere is neither a folder nor a file"):
        load_dit(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds 0 .safetensors files"):
        load_dit(tmp_path)
    folder = write_tiny(tmp_path / "shards")
    shard_in_two(folder)[1].unlink()
    with pytest.raises(UsageError, match="names part-2-of-2.safetensors, which is not there"):
        load_dit(folder)
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    save_file({"x": torch.ones(1)}, folder / "second.safetensors")
    with pytest.raises(UsageError, match="holds 2 .safetensors files and no index.json"):
        load_dit(folder)
    folder = write_tiny(tmp_path / "no config")
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="config.json is not valid JSON"):
        load_dit(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match="config.json is missing"):
        load_dit(folder)


# ----------------------------------------------------------------------------------------------------------
# LoRA
# ----------------------------------------------------------------------------------------------------------

EVERY_TARGET = "*.to_q,*.to_k,*.to_v,*.to_gate,*.to_out.0,*.ff.gate,*.ff.up,*.ff.down"     # text blocks too


def random_adapter(model: nft.Krea2DiT, name: str, seed: int) -> dict[str, torch.Tensor]:
    """Fills one adapter with values large enough to matter; returns them."""
    blank = nft.adapter_state(model, name)
    state = {k: 0.3 * draw(seed + i, *v.shape) for i, (k, v) in enumerate(blank.items())}
    nft.set_adapter(model, name, state)
    return state


def run_with(model: nft.Krea2DiT, name: str | None) -> torch.Tensor:
    with torch.no_grad(), use_adapter(model, name):
        return model(*tiny_inputs(), text_mask=MASKS["end"], grid=(2, 3))


def test_adapters_start_as_nothing_and_the_same():
    model = tiny_dit()
    base = run_with(model, None)
    paths = nft.add_lora(model, rank=4, alpha=8.0)
    assert len(paths) == 8 * 2 and all(p.startswith("transformer_blocks.") for p in paths)
    for name in (None, "live", "ema"):
        assert torch.equal(run_with(model, name), base)
    live, ema = nft.adapter_state(model, "live"), nft.adapter_state(model, "ema")
    for key in live:
        assert torch.equal(live[key], ema[key])
        assert (live[key].std() > 0.1) if ".lora_A." in key else (live[key] == 0).all()
    assert all(p.requires_grad == (".live" in k) for k, p in model.named_parameters())


def test_the_first_draw_depends_on_the_seed_alone():
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(draws))
        model = tiny_dit()
        nft.add_lora(model, rank=4, alpha=8.0, seed=seed)
        draws.append(nft.adapter_state(model, "live")["transformer_blocks.0.attn.to_q.lora_A.weight"])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_live_ema_and_off_are_chosen_per_forward_without_copies():
    model = tiny_dit()
    base, storage = run_with(model, None), {k: p.data_ptr() for k, p in model.named_parameters()}
    nft.add_lora(model, rank=4, alpha=8.0)
    random_adapter(model, "ema", 50)
    random_adapter(model, "live", 500)
    live, ema = run_with(model, "live"), run_with(model, "ema")
    random_adapter(model, "live", 5000)
    assert torch.equal(run_with(model, "ema"), ema) and torch.equal(run_with(model, None), base)
    for one, other in ((live, run_with(model, "live")), (live, ema), (ema, base)):
        assert (one - other).abs().max() > 0.01
    assert storage == {k: p.data_ptr() for k, p in model.named_parameters() if k in storage}


def test_use_adapter_puts_the_former_one_back_even_after_an_error():
    model = tiny_dit()
    with use_adapter(model, "ema"):
        with pytest.raises(ZeroDivisionError), use_adapter(model, "live"):
            assert model.adapters.name == "live"
            1 / 0
        assert model.adapters.name == "ema"
    assert model.adapters.name is None


def test_an_adapter_adds_alpha_over_rank_times_b_a():
    model = tiny_dit()
    nft.add_lora(model, rank=4, alpha=12.0)
    state, path = random_adapter(model, "live", 50), "transformer_blocks.1.ff.down"
    merged = tiny_dit()
    for key in state:
        if ".lora_A." in key:
            module = merged.get_submodule(key.removesuffix(".lora_A.weight"))
            module.weight += 3.0 * state[key.replace("lora_A", "lora_B")] @ state[key]
    assert_close(run_with(model, "live"), run_with(merged, None), 2e-5)
    assert set(state) >= {f"{path}.lora_A.weight", f"{path}.lora_B.weight"}


@pytest.mark.parametrize("targets, message", [
    ("to_q,to_qq", "'to_qq' matches no linear of the model; did you mean 'attn.to_q'"),
    (" , ", "names nothing"), ("ff", "'ff' matches no linear"), ("q", "'q' matches no linear"),
    ("final_layer.norm", "matches no linear"),
    ("text_fusion.*.to_z", r"'text_fusion.\*.to_z' matches no linear")])
def test_a_target_that_matches_nothing_is_refused(targets, message):
    with pytest.raises(UsageError, match=message):
        nft.add_lora(tiny_dit(), targets=targets)


def test_targets_are_suffixes_full_paths_or_patterns():
    paths = nft.add_lora(tiny_dit(), rank=2, targets="ff.down, img_in ,text_fusion.*.to_q")
    assert paths == ["img_in", "text_fusion.layerwise_blocks.0.attn.to_q",
                     "text_fusion.refiner_blocks.0.attn.to_q", "text_fusion.refiner_blocks.1.attn.to_q",
                     "transformer_blocks.0.ff.down", "transformer_blocks.1.ff.down"]


def test_adapters_are_fp32_on_a_bf16_base_and_take_small_steps(tmp_path):
    model = load_dit(write_tiny(tmp_path), dtype=torch.bfloat16)
    nft.add_lora(model, rank=4, alpha=8.0)
    random_adapter(model, "live", 50)
    parameters = nft.adapter_parameters(model, "live")
    before = [p.detach().clone() for p in parameters]
    with use_adapter(model, "live"):
        out = model(*tiny_inputs(), grid=(2, 3))
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16 and {p.grad.dtype for p in parameters} == {torch.float32}
    torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0).step()
    for p, old in zip(parameters, before):
        assert p.dtype == torch.float32
        assert ((p - old).abs() > 5e-7).float().mean() > 0.95     # a step that bf16 would round away
    assert not any(".lora_" not in k and p.grad is not None for k, p in model.named_parameters())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_outside_the_block_uses_the_adapter_of_its_forward(recompute):
    model = tiny_dit()
    nft.add_lora(model, rank=4, alpha=8.0)
    random_adapter(model, "live", 50)
    random_adapter(model, "ema", 500)

    def gradients(mode: str, after: str | None) -> list[torch.Tensor]:
        model.recompute = mode
        with use_adapter(model, "live"):
            loss = model(*tiny_inputs(), grid=(2, 3)).square().sum()
        with use_adapter(model, after):
            loss.backward()
        assert not any(p.grad is not None for p in nft.adapter_parameters(model, "ema"))
        found = [p.grad.clone() for p in nft.adapter_parameters(model, "live")]
        model.zero_grad(set_to_none=True)
        return found

    want = gradients("none", "live")
    assert all(g.abs().max() > 0 for g in want)
    for after in (None, "ema"):
        assert all(torch.equal(a, b) for a, b in zip(gradients(recompute, after), want))


def test_a_saved_adapter_comes_back_exactly(tmp_path):
    model = tiny_dit()
    nft.add_lora(model, rank=4, alpha=12.0, targets=EVERY_TARGET)
    state = random_adapter(model, "ema", 50)
    nft.save_lora(nft.adapter_state(model, "ema"), tmp_path / "x.safetensors", 12.0)
    back, alpha = nft.load_lora(tmp_path / "x.safetensors")
    assert alpha == 12.0 and back.keys() == state.keys()
    assert all(torch.equal(back[k], state[k]) for k in state)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("rank, alpha", [(4, 12.0), (2, 3.0)])
def test_diffusers_reads_a_saved_adapter_as_we_do(tmp_path, rank, alpha):
    model, theirs = tiny_models()
    model.requires_grad_(False)
    nft.add_lora(model, rank=rank, alpha=alpha, targets=EVERY_TARGET)
    random_adapter(model, "live", 50)
    nft.save_lora(nft.adapter_state(model, "live"), tmp_path / "adapter.safetensors", alpha)
    diffusers_pipeline(theirs).load_lora_weights(str(tmp_path), weight_name="adapter.safetensors")
    with torch.no_grad():
        want = diffusers_velocity(theirs, *tiny_inputs(), MASKS["end"], (2, 3))
    assert (want - run_with(model, None)).abs().max() > 0.01
    assert_close(run_with(model, "live"), want, 2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_not_saved(tmp_path, value):
    model, file = tiny_dit(), tmp_path / "x.safetensors"
    nft.add_lora(model, rank=4, alpha=8.0)
    state = nft.adapter_state(model, "live")
    nft.save_lora(state, file, 8.0)
    before = file.read_bytes()
    state["transformer_blocks.1.attn.to_k.lora_B.weight"][0, 0] = value
    with pytest.raises(ValueError, match="transformer_blocks.1.attn.to_k.lora_B.weight is not finite"):
        nft.save_lora(state, file, 8.0)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_adapter_of_another_model_is_refused_by_name():
    model = tiny_dit()
    nft.add_lora(model, rank=4, alpha=8.0)
    before = nft.adapter_state(model, "live")
    lacking = {k: v for k, v in before.items() if k != "transformer_blocks.0.ff.up.lora_A.weight"}
    with pytest.raises(UsageError, match="transformer_blocks.0.ff.up.lora_A.weight is missing"):
        nft.set_adapter(model, "live", lacking)
    with pytest.raises(UsageError, match="img_in.lora_A.weight is not a target here"):
        nft.set_adapter(model, "live", before | {"img_in.lora_A.weight": torch.ones(4, 64)})
    other = tiny_dit()
    nft.add_lora(other, rank=8, alpha=8.0)
    with pytest.raises(UsageError, match="check --lora-rank"):
        nft.set_adapter(model, "live", nft.adapter_state(other, "live"))


def test_a_file_that_is_no_adapter_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="absent.safetensors cannot be read"):
        nft.load_lora(tmp_path / "absent.safetensors")
    with pytest.raises(UsageError, match="pytorch_lora_weights.safetensors cannot be read"):
        nft.load_lora(tmp_path)
    for key, value, message in [
        ("transformer.img_in.weight", torch.ones(2, 2), "holds transformer.img_in.weight.*export"),
        ("diffusion_model.first.lora_A.weight", torch.ones(2, 2), "holds diffusion_model.*export"),
        ("transformer.img_in.lora_A.weight", torch.full((2, 2), math.nan), "lora_A.weight is not a finite"),
    ]:
        save_file({key: value}, tmp_path / "x.safetensors")
        with pytest.raises(UsageError, match=message):
            nft.load_lora(tmp_path / "x.safetensors")


def reference_lora(folder: Path, file: Path) -> nft.Krea2DiT:
    """The reference model with an adapter file in `live`."""
    model = load_dit(write_reference(folder))
    state, alpha = nft.load_lora(file)
    rank = next(iter(state.values())).shape[0]
    paths = nft.add_lora(model, rank=rank, alpha=alpha, targets=EVERY_TARGET)
    assert len(paths) == fixture("lora.json")["n_modules"]
    nft.set_adapter(model, "live", state)
    return model


@with_fixtures
def test_a_diffusers_adapter_gives_the_reference_outputs_and_gradients(tmp_path):
    model, stored = reference_lora(tmp_path, SHARED / "lora.safetensors"), fixture("lora_io.safetensors")
    a, b = reference_case("a", 1), reference_case("b", None)
    assert_close(model(*a["inputs"], **a["keywords"]), stored["a_t05.out_disabled"], 2e-5)
    with use_adapter(model, "live"):
        assert_close(model(*a["inputs"], **a["keywords"]), stored["a_t05.out_lora"], 2e-5)
        out = model(*b["inputs"], **b["keywords"])
    assert_close(out, stored["b.out_lora"], 2e-5)
    (out * stored["b.loss_weight"]).sum().backward()
    names = [k for k in nft.adapter_state(model, "live")]
    got = dict(zip(names, (p.grad for p in nft.adapter_parameters(model, "live"))))
    wanted = {k.removeprefix("b.grad.transformer."): v for k, v in stored.items() if k.startswith("b.grad.")}
    assert len(wanted) == 6
    for key, want in wanted.items():
        assert_close(got[key], want, 5e-5, relative=True)


@with_fixtures
def test_an_adapter_without_alpha_in_its_header_has_scale_one(tmp_path):
    save_file(fixture("lora.safetensors"), tmp_path / "plain.safetensors")
    model = reference_lora(tmp_path / "transformer", tmp_path / "plain.safetensors")
    ref, want = reference_case("a", 1), fixture("lora_io.safetensors")["a_t05.out_lora_no_metadata"]
    with use_adapter(model, "live"):
        assert_close(model(*ref["inputs"], **ref["keywords"]), want, 2e-5)


# ----------------------------------------------------------------------------------------------------------
# Randomness
# ----------------------------------------------------------------------------------------------------------

def test_a_seed_is_a_function_of_its_key_alone():
    assert nft.seed_for(1234, "rollout", 0, 1, 2) == 8550032453481532      # and so the same in any process
    keys = list(itertools.product((1, 2), ("rollout", "eval"), range(5), range(5)))
    keys += [(1, 23), (12, 3), ("1", 23), (123,)]
    seeds = [nft.seed_for(*k) for k in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= s < 2**53 for s in seeds)


def test_draws_neither_read_nor_move_the_global_generator():
    torch.manual_seed(0)
    first, state = torch.randn(3, generator=nft.generator(1, "x")), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3, generator=nft.generator(1, "x")), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    nft.initial_noise(5, (2, 3), 64, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------------------
# Flow
# ----------------------------------------------------------------------------------------------------------

def test_unpack_undoes_pack():
    latents = draw(1, 2, 5, 6, 10)
    assert torch.equal(unpack(nft.pack(latents), (3, 5)), latents)


def test_packing_equals_diffusers():
    latents, pipe = draw(1, 2, 16, 6, 10), diffusers_pipeline(tiny_models()[1])
    assert torch.equal(nft.pack(latents), pipe._pack_latents(latents, *latents.shape))


def test_noising_ends_at_the_data_and_at_the_noise():
    x0, eps = draw(1, 3, 4, 8), draw(2, 3, 4, 8)
    assert torch.equal(nft.noise_at(x0, eps, torch.zeros(3)), x0)
    assert torch.equal(nft.noise_at(x0, eps, torch.ones(3)), eps)
    mixed = nft.noise_at(x0, eps, torch.tensor([0.0, 0.25, 1.0]))
    assert_close(mixed[1], 0.75 * x0[1] + 0.25 * eps[1], 1e-6)
    assert torch.equal(mixed[0], x0[0]) and torch.equal(mixed[2], eps[2])


def test_times_fall_from_one_to_zero_and_equal_the_scheduler():
    for steps, tokens in ((1, 12), (4, 12), (10, 4096), (52, 6400)):
        scheduler = diffusers_pipeline(tiny_models()[1]).scheduler
        scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)], mu=nft.shift_mu(tokens))
        times = nft.sigmas(steps, tokens)
        assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all() and times.dtype == torch.float32
        assert_close(times, scheduler.sigmas, 1e-6)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        nft.sigmas(0, 12)


def test_pretraining_times_are_shifted_logit_normal():
    for shift in (1.0, 3.0):
        t = nft.logit_normal_times(2000, shift, nft.generator(1, "times"))
        assert ((t > 0) & (t < 1)).all()
        assert torch.equal(t, nft.logit_normal_times(2000, shift, nft.generator(1, "times")))
        z = torch.logit(t.double())      # the shift of the logistic curve is an offset of its logit
        assert abs(z.mean().item() - torch.tensor(shift).log().item()) < 0.1 and abs(z.std().item() - 1) < 0.1


def test_the_perfect_velocity_has_no_flow_loss():
    x0, eps, t = draw(1, 3, 4, 8), draw(2, 3, 4, 8), torch.tensor([0.1, 0.5, 0.9])
    offset = torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)

    def model(x, text, times, *, text_mask, grid):
        assert torch.equal(x, nft.noise_at(x0, eps, t)) and torch.equal(times, t) and grid == (2, 2)
        return eps - x0 + offset

    loss = nft.rectified_flow_loss(model, x0, torch.zeros(3, 1, 1, 1), t, eps, (2, 2))
    assert loss[0] == 0
    assert_close(loss, torch.tensor([0.0, 1.0, 4.0]), 1e-6)


def test_a_padded_batch_samples_each_image_as_if_alone():
    model, grid = tiny_dit(), (2, 3)
    _, text, _ = tiny_inputs()
    texts = [text[0], text[1, :3]]
    noise = torch.cat([nft.initial_noise(s, grid, 64, torch.float32) for s in (1, 2)])
    padded, mask = nft.pad_text(texts)
    assert mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    assert nft.pad_text([texts[0], texts[0]])[1] is None
    times = nft.sigmas(4, 6)
    together = nft.sample(model, noise, padded, times, grid, text_mask=mask)
    for i in range(2):
        alone = nft.sample(model, noise[i:i + 1], texts[i][None], times, grid)
        assert_close(together[i:i + 1], alone, 5e-6)


@pytest.mark.parametrize("cfg", [0.0, 3.5])
def test_sampling_equals_the_diffusers_pipeline(cfg):
    ours, theirs = tiny_models()
    _, text, _ = tiny_inputs()
    noise, mask, steps = draw(5, 2, 6, 64), MASKS["middle"], []
    negative, negative_mask = draw(6, 2, 6, 4, 24), MASKS["end"]
    more = dict(negative_prompt_embeds=negative, negative_prompt_embeds_mask=negative_mask) if cfg else {}

    def keep(pipe, i, t, tensors):
        steps.append(tensors["latents"].clone())
        return tensors

    diffusers_pipeline(theirs)(height=32, width=48, num_inference_steps=4, guidance_scale=cfg,
                               latents=noise.clone(), prompt_embeds=text, prompt_embeds_mask=mask,
                               output_type="latent", callback_on_step_end=keep, **more)
    got = []
    out = nft.sample(ours, noise, text, nft.sigmas(4, 6), (2, 3), text_mask=mask, cfg=cfg, negative=negative,
                     negative_mask=negative_mask, on_step=lambda i, x: got.append(x))
    assert len(got) == len(steps) == 4 and torch.equal(got[-1], out)
    for ours_i, theirs_i in zip(got, steps):
        assert_close(ours_i, theirs_i, 2e-4)


def test_a_negative_prompt_may_have_another_length():
    model, (_, text, _), noise = tiny_dit(), tiny_inputs(), draw(5, 2, 6, 64)
    short = draw(6, 2, 3, 4, 24)
    padded, mask = nft.pad_text([short[0], short[1], text[0]])
    run = functools.partial(nft.sample, model, noise, text, nft.sigmas(3, 6), (2, 3), cfg=3.5)
    want = run(negative=padded[:2], negative_mask=mask[:2])
    assert_close(run(negative=short), want, 2e-5)
    assert (run(negative=text) - want).abs().max() > 0.01


def test_guidance_without_a_negative_prompt_is_refused():
    _, text, _ = tiny_inputs()
    with pytest.raises(ValueError, match="cfg > 0 needs `negative`"):
        nft.sample(tiny_dit(), draw(5, 2, 6, 64), text, nft.sigmas(2, 6), (2, 3), cfg=1.0)


@with_fixtures
def test_every_stored_schedule_is_met():
    entries = fixture("schedule.json")["entries"]
    assert {e["kind"] for e in entries} == {"raw", "turbo"}
    for e in entries:
        mu = 1.15 if e["kind"] == "turbo" else None
        assert abs((mu or nft.shift_mu(e["image_seq_len"])) - e["mu"]) <= 1e-12
        times = nft.sigmas(e["steps"], e["image_seq_len"], mu)
        for key in ("sigmas_diffusers", "sigmas_official"):
            assert_close(times, torch.tensor(e[key], dtype=torch.float64), 1e-6)


@with_fixtures
def test_packing_equals_the_reference():
    stored = fixture("pack.safetensors")
    for latents, tokens in (("latents", "tokens"), ("index_latents", "index_tokens")):
        assert torch.equal(nft.pack(stored[latents]), stored[tokens])
        assert torch.equal(unpack(stored[tokens], (3, 5)), stored[latents])


@with_fixtures
def test_the_noise_of_a_sample_follows_from_its_seed():
    stored, seeds = fixture("trajectory.safetensors"), fixture("trajectory.json")["info"]["noise_seeds"]
    noise = torch.cat([nft.initial_noise(s, (4, 3), 64, torch.float32) for s in seeds])
    assert torch.equal(noise, nft.pack(stored["noise"])) and torch.equal(noise, stored["nocfg.latents"][0])


@with_fixtures
@pytest.mark.parametrize("kind", ["nocfg", "cfg"])
def test_every_step_of_the_stored_trajectories_is_met(tmp_path, kind):
    stored, info = fixture("trajectory.safetensors"), fixture("trajectory.json")[kind]
    want, got = stored[f"{kind}.latents"], []
    nft.sample(load_dit(write_reference(tmp_path)), want[0], stored["prompt_embeds"],
               nft.sigmas(info["steps"], 12), (4, 3), text_mask=stored["prompt_mask"], cfg=info["guidance"],
               negative=stored["negative_embeds"], negative_mask=stored["negative_mask"],
               on_step=lambda i, x: got.append(x))
    assert_close(torch.stack(got), want[1:], 2e-4)


@with_fixtures
def test_the_stored_turbo_image_is_met(tmp_path):
    stored = fixture("trajectory.safetensors")
    got = nft.sample(load_dit(write_reference(tmp_path)), stored["nocfg.latents"][0], stored["prompt_embeds"],
                     nft.sigmas(8, 12, mu=1.15), (4, 3), text_mask=stored["prompt_mask"])
    assert_close(got, stored["turbo8.final"], 2e-4)


# ----------------------------------------------------------------------------------------------------------
# NFT: advantages, loss, EMA decay
# ----------------------------------------------------------------------------------------------------------

def velocities(seed: int = 0) -> dict[str, torch.Tensor]:
    """v_old, x_t, x0 of (4, 6, 8) and t (4,), as nft_loss takes them."""
    x0, eps, t = draw(seed, 4, 6, 8), draw(seed + 1, 4, 6, 8), torch.tensor([0.9, 0.6, 0.3, 0.05])
    return dict(v_old=eps - x0 + 0.3 * draw(seed + 2, 4, 6, 8), x_t=nft.noise_at(x0, eps, t), x0=x0, t=t)


def loss_and_gradient(v_new: torch.Tensor, r: torch.Tensor, **keywords) -> tuple[torch.Tensor, torch.Tensor]:
    v_new = v_new.clone().requires_grad_()
    loss = nft.nft_loss(v_new, r=r, **keywords)
    loss.sum().backward()
    return loss.detach(), v_new.grad


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("adaptive", [True, False])
def test_on_policy_the_loss_does_not_see_the_reward_and_its_gradient_does(beta, adaptive):
    given = velocities()
    run = functools.partial(loss_and_gradient, given["v_old"], beta=beta, adaptive=adaptive, **given)
    loss_1, gradient_1 = run(r=torch.ones(4))
    assert (loss_1 > 0).all() and (gradient_1.flatten(1).abs().amax(1) > 1e-4).all()
    for r in (0.0, 0.3, 0.5, 0.8):
        loss, gradient = run(r=torch.full((4,), r))
        assert_close(loss, loss_1, 1e-6, relative=True)
        assert (gradient - (2 * r - 1) * gradient_1).abs().max() <= 1e-5 * gradient_1.abs().max()


def test_a_good_sample_pulls_the_velocity_towards_itself_and_a_bad_one_pushes_it_away():
    given = velocities()
    target = (given["x_t"] - given["x0"]) / given["t"].view(-1, 1, 1)     # x_t - t v = x0
    for r, sign in ((1.0, 1), (0.0, -1)):
        _, gradient = loss_and_gradient(given["v_old"], torch.full((4,), r), **given)
        towards = (-gradient * (target - given["v_old"])).sum((1, 2))
        assert (sign * towards > 0).all()


def test_the_loss_is_per_sample():
    given, r = velocities(), torch.tensor([0.1, 0.9, 0.4, 0.6])
    v_new = given["v_old"] + 0.1 * draw(9, 4, 6, 8)
    whole = nft.nft_loss(v_new, r=r, **given)
    assert whole.shape == (4,) and whole.dtype == torch.float64
    for i in range(4):
        one = {k: v[i:i + 1] for k, v in given.items()}
        assert_close(nft.nft_loss(v_new[i:i + 1], r=r[i:i + 1], **one), whole[i:i + 1], 1e-6)


def test_the_kl_term_is_its_weight_times_the_mean_squared_distance_to_the_reference():
    given, r = velocities(), torch.tensor([0.1, 0.9, 0.4, 0.6])
    v_new, v_ref = given["v_old"] + 0.1 * draw(9, 4, 6, 8), draw(8, 4, 6, 8)
    plain, gradient = loss_and_gradient(v_new, r, **given)
    more, more_gradient = loss_and_gradient(v_new, r, kl_weight=0.7, v_ref=v_ref, **given)
    assert_close(more - plain, 0.7 * (v_new - v_ref).double().square().mean((1, 2)), 1e-6)
    assert_close(more_gradient - gradient, 0.7 * 2 * (v_new - v_ref) / 48, 1e-6)
    at_reference = nft.nft_loss(v_ref, r=r, kl_weight=0.7, v_ref=v_ref, **given)
    assert torch.equal(at_reference, nft.nft_loss(v_ref, r=r, **given))


def test_the_adaptive_weight_carries_no_gradient_and_has_a_floor():
    given, r = velocities(), torch.ones(4)
    v_new = given["v_old"] + 0.1 * draw(9, 4, 6, 8)
    _, gradient = loss_and_gradient(v_new, r, **given)
    _, plain = loss_and_gradient(v_new, r, adaptive=False, **given)
    w = (given["x_t"] - given["t"].view(-1, 1, 1) * v_new - given["x0"]).abs().mean((1, 2), keepdim=True)
    assert_close(gradient * w, plain, 1e-5, relative=True)
    exact = given | dict(x_t=given["x0"], v_old=torch.zeros(4, 6, 8))
    loss, gradient = loss_and_gradient(torch.zeros(4, 6, 8), r, **exact)
    assert (loss == 0).all() and torch.isfinite(gradient).all()


def test_reward_weights_are_clipped_to_zero_and_one():
    a = torch.tensor([-9.0, -5.0, -2.5, 0.0, 2.5, 5.0, 9.0])
    assert nft.reward_weight(a).tolist() == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert nft.reward_weight(a, clip=2.5).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]


REWARDS = torch.tensor([[0.1, 0.9, 0.4, 0.4], [0.7, 0.7, 0.7, 0.7], [1.0, 0.0, 1.0, 0.0]]).double()


@pytest.mark.parametrize("std", ["prompt", "global"])
def test_a_group_without_spread_pulls_nowhere(std):
    a = nft.advantages(REWARDS, std=std)
    assert_close(nft.reward_weight(a)[1], torch.full((4,), 0.5), 1e-12)
    assert (a[0] != 0).all() and a[2, 0] > 0 > a[2, 1]


@pytest.mark.parametrize("mean", ["prompt", "global"])
@pytest.mark.parametrize("std", ["prompt", "global"])
@pytest.mark.parametrize("junk", [0.0, 100.0, float("nan")])
def test_a_failed_reward_leaves_means_and_spreads_alone(mean, std, junk):
    spoilt = torch.cat([REWARDS, torch.full((3, 1), junk, dtype=torch.float64)], dim=1)
    valid = torch.tensor([[True] * 4 + [False]] * 3)
    got = nft.advantages(spoilt, mean=mean, std=std, valid=valid)
    assert_close(got[:, :4], nft.advantages(REWARDS, mean=mean, std=std), 1e-12)
    assert (got[:, 4] == 0).all()


def test_a_prompt_whose_rewards_all_failed_gets_no_advantage():
    valid = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    got = nft.advantages(torch.where(valid, REWARDS, torch.nan), valid=valid)
    assert (got[1] == 0).all() and torch.isfinite(got).all()
    assert_close(got[[0, 2]], nft.advantages(REWARDS[[0, 2]]), 1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_prompt_and_sample(value):
    bad = REWARDS.clone()
    bad[2, 1] = value
    with pytest.raises(ValueError, match="reward of prompt 2, sample 1 is"):
        nft.advantages(bad)
    with pytest.raises(ValueError, match=r"\(prompts, samples\)"):
        nft.advantages(REWARDS[0])


def test_ema_decay_rises_to_its_limit():
    assert [nft.ema_decay(s) for s in (0, 1, 250, 500, 9999)] == [0.0, 0.001, 0.25, 0.5, 0.5]
    assert nft.ema_decay(74, rate=0.0075, limit=0.999, start=75) == 0.0


@with_fixtures
def test_losses_and_gradients_equal_the_reference():
    stored, info, gradients = fixture("nft.safetensors"), fixture("nft.json"), 0
    c = info["adv_clip_max"]
    given = dict(v_old=stored["v_old"], x_t=stored["xt"], x0=stored["x0"], t=stored["t"])
    for e in info["loss"]:
        key = e["key"]
        r = nft.reward_weight(stored["advantages"], c) if e["adv_mode"] == "all" else stored[f"{key}.r"]
        assert_close(r, stored[f"{key}.r"], 1e-12)
        plain = nft.nft_loss(stored["v_new"], r=r, beta=e["beta"], clip=c, **given)
        assert_close(plain / c, stored[f"{key}.per_sample"], 1e-6)
        v_new = stored["v_new"].clone().requires_grad_()
        total = nft.nft_loss(v_new, r=r, beta=e["beta"], clip=c, kl_weight=e["kl_beta"],
                             v_ref=stored["v_ref"], **given).mean()
        total.backward()
        assert abs(total.item() - e["total"]) <= 1e-6 * max(1, e["total"])
        if f"{key}.grad_v_new" in stored:
            assert_close(v_new.grad, stored[f"{key}.grad_v_new"], 1e-6)
            assert_close(v_new.grad, stored[f"{key}.grad_v_new"], 1e-4, relative=True)
            gradients += 1
    assert gradients == 6 and len(info["loss"]) > 6


@with_fixtures
def test_the_on_policy_loss_equals_the_reference():
    stored = fixture("nft.safetensors")
    given = dict(v_old=stored["v_old"], x_t=stored["xt"], x0=stored["x0"], t=stored["t"])
    v_new = stored["v_old"].clone().requires_grad_()
    loss = nft.nft_loss(v_new, r=nft.reward_weight(stored["advantages"]), beta=0.1, **given)
    loss.mean().backward()
    assert_close(loss.detach() / 5, stored["onpolicy_beta0.1.per_sample"], 1e-6)
    assert_close(v_new.grad, stored["onpolicy_beta0.1.grad_v_new"], 1e-6)


@with_fixtures
def test_advantages_equal_the_reference():
    stored = fixture("nft.safetensors")
    for mean, std, key in (("prompt", "global", "per_prompt_mean_global_std"),
                           ("prompt", "prompt", "per_prompt_mean_per_prompt_std"),
                           ("global", "global", "global_mean_global_std")):
        assert_close(nft.advantages(stored["adv.rewards"], mean=mean, std=std), stored[f"adv.{key}"], 1e-6)


@with_fixtures
def test_ema_decay_equals_the_reference():
    kinds = {"0": dict(rate=0.0), "1": {}, "2": dict(rate=0.0075, limit=0.999, start=75)}
    assert kinds.keys() == fixture("nft.json")["ema_decay"].keys()
    for kind, keywords in kinds.items():
        for step, want in fixture("nft.json")["ema_decay"][kind].items():
            assert abs(nft.ema_decay(int(step), **keywords) - want) <= 1e-12


# ----------------------------------------------------------------------------------------------------------
# Text
# ----------------------------------------------------------------------------------------------------------

@functools.cache
def reference_encoder() -> PromptEncoder:
    return PromptEncoder(SHARED, max_text=24, taps=(1, 3, 5))


@with_fixtures
@pytest.mark.parametrize("key", ["p1", "p2", "p_long", "p_empty"])
def test_prompts_are_encoded_as_by_the_reference(key):
    stored, prompt = fixture("text.safetensors"), fixture("text.json")["prompts"][key]
    [got] = reference_encoder().encode([prompt])
    assert_close(got, stored[f"{key}.hidden_diffusers"][stored[f"{key}.mask"]], 1e-4)
    assert len(got) == {"p_long": 24, "p_empty": 5}.get(key, len(got))


@with_fixtures
def test_a_prompt_is_encoded_the_same_in_any_company():
    prompts = [fixture("text.json")["prompts"][k] for k in ("p1", "p2", "p_long")]
    together = reference_encoder().encode(prompts)
    fresh = copy.copy(reference_encoder())
    fresh.known = type(fresh.known)()
    alone = [fresh.encode([p])[0] for p in reversed(prompts)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(together, alone))


def test_encoded_prompts_are_remembered_up_to_so_many_bytes(toy):
    encoder = PromptEncoder(toy, cache_mib=0)
    room = encoder.free = 3 * encoder.encode(['a sign that says "CAT"'])[0].nbytes
    words = [f'a sign that says "{x}"' for x in ("CAT", "ACT", "TAC", "TEA")]
    first = encoder.encode(words[:3])
    assert encoder.encode(words[:1])[0] is first[0], "remembered"
    encoder.encode(words[3:])
    assert list(encoder.known) == [words[2], words[0], words[3]], "the one used longest ago was dropped"
    assert encoder.free + sum(x.nbytes for x in encoder.known.values()) == room


@with_fixtures
def test_another_models_tokenizer_is_refused(tmp_path):
    spoilt = json.loads((SHARED / "tokenizer" / "tokenizer.json").read_text())
    spoilt["model"]["merges"] = spoilt["model"]["merges"][:-20]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(spoilt))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(
        (SHARED / "tokenizer" / "tokenizer_config.json").read_text())
    (tmp_path / "text_encoder").symlink_to(SHARED / "text_encoder")
    with pytest.raises(ValueError, match="another model's tokenizer"):
        PromptEncoder(tmp_path, max_text=24, taps=(1, 3, 5))


# ----------------------------------------------------------------------------------------------------------
# OCR reward
# ----------------------------------------------------------------------------------------------------------

def word_picture(word: str, size: tuple[int, int] = (96, 32)) -> np.ndarray:
    """Dark DejaVu letters on a light ground, (H, W, 3) uint8."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    picture = PIL.Image.new("RGB", size, (240, 235, 220))
    font = PIL.ImageFont.truetype(str(file), round(size[1] * 0.85))
    centre = (size[0] / 2, size[1] / 2)
    PIL.ImageDraw.Draw(picture).text(centre, word, fill=(20, 30, 80), font=font, anchor="mm")
    return np.asarray(picture)


WORDS = ["CAT", "HEN", "MAP", "TEA", "NAP", "BAT", "PET", "RAN"]


def exact_count(results: list) -> int:
    return sum(isinstance(x, OCRResult) and x.exact for x in results)


def quoted(words: list[str]) -> list[str]:
    return [f'a sign that says "{w}"' for w in words]


@pytest.fixture(scope="module")
def reader():
    with OCRReward(2, batch=4) as pool:
        pool.warm_up()
        yield pool


@pytest.mark.parametrize("prompt, spans", [
    ('a sign that says "CAT"', ["CAT"]), ("a “BIG” sign", ["BIG"]), ('"A" and then “B”', ["A", "B"]),
    ("it's a dog's \"BONE\"", ["BONE"])])
def test_targets_are_the_quoted_texts(prompt, spans):
    assert target_spans(prompt) == spans and target_text(prompt) == " ".join(spans)


@pytest.mark.parametrize("prompt", ["a sign without a word", 'an empty "" one', 'never "closed', ""])
def test_a_prompt_without_a_quoted_text_is_refused_with_the_prompt(prompt):
    with pytest.raises(ValueError) as e:
        target_text(prompt)
    assert prompt in str(e.value)


def test_similarity_is_one_only_for_the_same_text_and_surplus_costs():
    assert text_similarity("CAT", " c a t ") == 1 and text_similarity("Cafe\u0301", "ＣＡＦÉ") == 1
    assert text_similarity("CAT", "COT") == pytest.approx(2 / 3) and text_similarity("CAT", "") == 0
    scores = [text_similarity("CAT", "CAT" + "X" * n) for n in range(8)]
    assert scores[0] == 1 and scores[-1] == 0
    assert all(a > b or a == b == 0 for a, b in itertools.pairwise(scores))
    assert text_similarity("CAT", "CATXX") == pytest.approx(1 - 0.5 * 2 / 3)
    assert text_similarity("CAT", "junk CAT junk", surplus=0) == 1, "the plain rule of the published recipe"
    assert text_similarity(["AB", "CD"], "abcd") == 1 > text_similarity(["AB", "CD"], "cdab")


@pytest.mark.parametrize("form", ["uint8 HWC", "float CHW tensor", "RGBA", "grey", "grey HW1 float"])
def test_images_of_every_usual_form_are_read(reader, form):
    image = word_picture("CAT")
    grey = image.mean(2).astype(np.uint8)
    forms = {"uint8 HWC": image, "float CHW tensor": torch.from_numpy(image.copy()).permute(2, 0, 1) / 255,
             "RGBA": np.dstack([image, np.full(image.shape[:2], 255, np.uint8)]), "grey": grey,
             "grey HW1 float": grey[..., None].astype(np.float32) / 255}
    assert reader.submit(forms[form], '"CAT"').result().exact


@pytest.mark.parametrize("image", [
    np.zeros((4, 40), np.uint8), np.full((32, 32), np.nan), np.full((32, 32), 1.5), np.zeros((1, 3, 32, 32)),
    np.zeros((32, 32, 2)), np.zeros((32, 32), np.int64), "a.png"], ids=str)
def test_images_of_odd_shapes_are_refused_in_one_sentence(reader, image):
    with pytest.raises(ValueError) as e:
        reader.submit(image, '"CAT"')
    assert "\n" not in str(e.value) and len(str(e.value)) > 20


def test_blank_and_noisy_images_have_no_text_and_no_reward(reader):
    noise = np.random.default_rng(0).integers(0, 256, (32, 96, 3), dtype=np.uint8)
    for image in (np.full((32, 96, 3), 200, np.uint8), noise):
        result = reader.submit(image, '"CAT"').result()
        assert result.text == "" and result.reward == 0


def test_a_reading_does_not_depend_on_its_company(reader):
    images = [word_picture(w) for w in WORDS] + [word_picture("TAPE", (128, 48))]
    prompts = quoted([*WORDS, "TAPE"])
    together = [(x.text, x.reward) for x in reader(images, prompts)]
    alone = [(x.text, x.reward) for x in (reader.submit(i, p).result() for i, p in zip(images, prompts))]
    assert together == alone and sum(r == 1 for _, r in alone) >= 7


def test_a_killed_worker_is_replaced_and_its_images_are_read_again(reader):
    before = reader.pids
    futures = [reader.submit(word_picture(w), p) for w, p in zip(WORDS * 3, quoted(WORDS * 3))]
    os.kill(before[0], signal.SIGKILL)
    assert exact_count([f.result() for f in futures]) >= 21
    assert reader.pids[0] != before[0] and reader.pids[1] == before[1]


def test_a_hung_worker_is_replaced():
    with OCRReward(1, batch=4, timeout=15) as pool:
        pool.warm_up()
        before = pool.pids
        os.kill(before[0], signal.SIGSTOP)
        assert exact_count(pool([word_picture(w) for w in WORDS], quoted(WORDS))) >= 7
        assert pool.pids != before


def test_only_the_image_that_kills_its_reader_fails(reader, monkeypatch):
    poison, ask = word_picture("PEN"), ocr_reward._Worker.ask

    def killed_by_poison(worker, message, timeout):
        if isinstance(message, list) and any(np.array_equal(x, poison) for x in message):
            worker.process.kill()
        return ask(worker, message, timeout)

    monkeypatch.setattr(ocr_reward._Worker, "ask", killed_by_poison)
    results = reader([word_picture("CAT"), poison, word_picture("MAP")], quoted(["CAT", "PEN", "MAP"]))
    assert [type(x) for x in results] == [OCRResult, OCRError, OCRResult]


def test_weights_that_are_no_weights_are_an_error_and_not_an_endless_restart(tmp_path):
    with pytest.raises(ValueError, match="pth"):
        OCRReward(1, model_dir=tmp_path)
    (tmp_path / "craft_mlt_25k.pth").write_text("not weights")
    with OCRReward(1, model_dir=tmp_path) as pool, pytest.raises(OCRError):
        pool.warm_up()


def test_workers_end_with_the_pool():
    pool = OCRReward(1)
    pool.warm_up()
    pids = pool.pids
    futures = [pool.submit(word_picture(w), p) for w, p in zip(WORDS * 4, quoted(WORDS * 4))]
    pool.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert all(f.done() for f in futures) and isinstance(futures[-1].exception(), OCRError)
    with pytest.raises(OCRError):
        pool.submit(word_picture("CAT"), '"CAT"')


# ----------------------------------------------------------------------------------------------------------
# The loop, on the toy
# ----------------------------------------------------------------------------------------------------------

TRAINER = [sys.executable, ROOT / "nft_krea2.py"]


@pytest.fixture(scope="session")
def toy() -> Path:
    """The toy folder, built unless it is there: the same one that a user's first start makes."""
    subprocess.run([sys.executable, ROOT / "tools" / "make_toy.py"], check=True)
    return ROOT / "toy"


def settings(runs: Path, *more: str) -> list[str]:
    return ["--recipe", "toy", "--runs", str(runs), "--name", "run", *map(str, more)]


def small(runs: Path, *more: str) -> list[str]:
    """Two prompts, four samples: the whole loop in seconds."""
    return settings(runs, "--prompts", 2, "--samples", 4, "--rollout-batch", 3, "--train-times", 2,
                    "--optimizer-steps", 2, "--eval-limit", 2, "--eval-samples", 2, "--sample-steps", 5,
                    "--micro-batch", 3, "--kl-weight", 0.1, *more)


def start(arguments: list[str], ranks: int = 1) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launch = TRAINER if ranks == 1 else [*torchrun, TRAINER[1]]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, *arguments], capture_output=True, text=True, env=env, timeout=600)


def metrics(runs: Path) -> list[dict]:
    return [json.loads(x) for x in (runs / "run" / "metrics.jsonl").read_text().splitlines()]


def last_state(runs: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, whole, as KIND.KEY."""
    folder = nft.state_folders(runs / "run")[-1][1]
    return {f"{kind}.{k}": v for kind in ("live", "ema", *nft.MOMENTS)
            for k, v in nft.read_state(folder, kind).items()}


def held_out(runs: Path, step: int) -> float:
    return nft.recorded_evaluation(runs / "run", step)["eval/ocr_test"]


def assert_good(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def uninterrupted(toy, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    assert_good(start(small(runs, "--steps", 4)))
    return runs


def test_a_run_leaves_what_the_readme_promises(uninterrupted):
    run = uninterrupted / "run"
    assert [m["step"] for m in metrics(uninterrupted)] == [0, 1, 2, 3]
    names = {"reward/mean", "reward/std", "reward/zero_spread_groups", "reward/failed", "loss/nft", "loss/kl",
             "policy/drift", "grad_norm", "time/sync", "time/rollout", "time/reward", "time/train",
             "time/save", "mem/allocated", "mem/reserved", "images_per_s"}
    assert names <= set(metrics(uninterrupted)[0]) and "eval/ocr_test" in metrics(uninterrupted)[-1]
    assert PIL.Image.open(run / "images" / "before_after.png").width > 192
    state, alpha = nft.load_lora(run / "lora" / "step_4" / "pytorch_lora_weights.safetensors")
    ema = {k.removeprefix("ema."): v for k, v in last_state(uninterrupted).items() if k.startswith("ema.")}
    assert alpha == 16 and all(torch.equal(state[k], ema[k]) for k in ema), "users get the EMA adapter"
    assert any(v.abs().max() > 0 for k, v in state.items() if ".lora_B." in k)
    assert [step for step, _ in nft.state_folders(run)] == [3, 4], "the last two states are kept"
    about = json.loads((run / "state" / "step_4" / "state.json").read_text())
    assert (about["step"], about["updates"], about["ranks"], about["prompt_position"]) == (4, 8, 1, 8)
    assert about["versions"]["torch"] == torch.__version__.split("+")[0] and about["settings"]["lr"] == 1e-3
    assert (run / "log.txt").read_text().count("reward") >= 6, "every rollout and both evaluations"


def test_resume_is_bit_exact(uninterrupted, tmp_path):
    assert_good(start(small(tmp_path, "--steps", 2)))
    assert_good(start(small(tmp_path, "--steps", 4)))
    resumed, straight = last_state(tmp_path), last_state(uninterrupted)
    assert resumed.keys() == straight.keys() and all(torch.equal(resumed[k], straight[k]) for k in straight)
    same = [{k: v for k, v in m.items() if not k.startswith(("time", "mem", "images", "eval"))} for runs in
            (tmp_path, uninterrupted) for m in metrics(runs)]
    assert same[:4] == same[4:]


def test_two_ranks_train_as_one(uninterrupted, tmp_path):
    assert_good(start(small(tmp_path, "--steps", 4), ranks=2))
    for one, two in zip(metrics(uninterrupted), metrics(tmp_path), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert one["loss/nft"] == pytest.approx(two["loss/nft"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
    one, two = last_state(uninterrupted), last_state(tmp_path)
    moved = [k for k in one if k.startswith("ema.") and ".lora_B." in k]
    error = sum((one[k] - two[k]).square().sum() for k in moved) / sum(one[k].square().sum() for k in moved)
    assert error.sqrt() < 0.02


def test_a_killed_run_goes_on_and_a_finished_one_says_so(uninterrupted, tmp_path):
    # A test run in the background of a shell inherits an ignored Ctrl-C; a user's run does not.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen([*TRAINER, *small(tmp_path, "--steps", 4)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
                               preexec_fn=heed)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "state" / "step_1").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert_good(start(small(tmp_path, "--steps", 4)))
    straight, resumed = last_state(uninterrupted), last_state(tmp_path)
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)
    again = start(small(tmp_path, "--steps", 4))
    assert_good(again)
    assert "finished" in again.stdout and "held-out reward" in again.stdout


def launched(runs: Path, *more: str, ranks: int = 1) -> subprocess.Popen:
    """A small run in the background, under its own torchrun when it has several ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launch = TRAINER if ranks == 1 else [*torchrun, TRAINER[1]]
    return subprocess.Popen([*launch, *small(runs, *more)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def await_file(path: Path, running: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0][-3000:]
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_sigterm_saves_the_last_step_and_ends_with_0(uninterrupted, tmp_path):
    running = launched(tmp_path, "--steps", 4, "--save-every", 100)      # no other reason to save
    await_file(tmp_path / "run" / "metrics.jsonl", running)
    time.sleep(1)
    running.terminate()
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 0, said
    step = nft.state_folders(tmp_path / "run")[-1][0]
    assert 1 <= step < 4 and f"step {step} saved" in said, said
    assert_good(start(small(tmp_path, "--steps", 4)))
    straight, resumed = last_state(uninterrupted), last_state(tmp_path)
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)


def test_sigterm_to_all_ranks_saves_a_step_that_another_rank_count_goes_on_from(uninterrupted, tmp_path):
    running = launched(tmp_path, "--steps", 4, "--save-every", 100, ranks=2)
    await_file(tmp_path / "run" / "metrics.jsonl", running)
    time.sleep(1)
    ranks = [pid for pid in children(running.pid) if "nft_krea2" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == 2
    for pid in ranks:       # as Slurm does
        os.kill(pid, signal.SIGTERM)
    said = running.communicate(timeout=60)[0]
    step, folder = nft.state_folders(tmp_path / "run")[-1]
    assert running.returncode == 0 and f"step {step} saved" in said, said
    assert {x.name for x in folder.iterdir()} == {"rank_0.safetensors", "rank_1.safetensors", "state.json"}
    assert_good(start(small(tmp_path, "--steps", 4)))
    for a, b in zip(metrics(uninterrupted), metrics(tmp_path), strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        assert a["loss/nft"] == pytest.approx(b["loss/nft"], rel=1e-4)


def state_writer(tmp_path: Path, **settings) -> nft.StateWriter:
    (tmp_path / "state").mkdir(exist_ok=True)
    return nft.StateWriter(tmp_path, nft.Config(**settings))


def snapshot_of(step: int, value: float = 0.0, rows: int = 2) -> nft.Snapshot:
    return nft.Snapshot(step, step, {"live.x": torch.full((rows, 3), value)})


def test_the_newest_checkpoints_stay_and_every_nth_for_good(tmp_path):
    writer = state_writer(tmp_path, keep_states=2, keep_every=3)
    for step in range(1, 9):
        writer.keep(snapshot_of(step))
        writer.start()
    writer.wait()
    assert [step for step, _ in nft.state_folders(tmp_path)] == [3, 6, 7, 8]
    assert not list((tmp_path / "state").glob(".*")), "no leftover"


def test_ranks_a_step_apart_save_the_step_that_both_have(tmp_path):
    ahead, behind = state_writer(tmp_path, rank=0, world=2), state_writer(tmp_path, rank=1, world=2)
    for step in (4, 5):
        ahead.keep(snapshot_of(step, value=0))
    for step in (3, 4):
        behind.keep(snapshot_of(step, value=1, rows=1))
    with ThreadPoolExecutor() as pool:
        saved = [x.result() for x in [pool.submit(writer.stop) for writer in (behind, ahead)]]
    assert saved == [4, 4] and [step for step, _ in nft.state_folders(tmp_path)] == [4]
    whole = nft.read_state(tmp_path / "state" / "step_4", "live")["x"]
    assert whole[:, 0].tolist() == [0, 0, 1], "rows of rank 0, then of rank 1"


def test_a_rank_whose_part_never_comes_is_told_and_nothing_counts(tmp_path):
    alone = state_writer(tmp_path, rank=0, world=2)
    alone._save([snapshot_of(1)], 0.1)
    with pytest.raises(nft.TrainingError, match="all nodes share"):
        alone.wait()
    assert nft.state_folders(tmp_path) == []


def test_a_full_disk_stops_with_a_sentence_and_the_last_checkpoint_stands(tmp_path):
    writer = state_writer(tmp_path)
    writer.keep(snapshot_of(1))
    writer.start()
    writer.wait()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))         # a write beyond it fails
    try:
        writer.keep(snapshot_of(2, rows=10_000))
        writer.start()
        with pytest.raises(nft.TrainingError, match="could not be written.*last whole one stands"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [step for step, _ in nft.state_folders(tmp_path)] == [1]


def test_a_spoilt_checkpoint_is_named(tmp_path):
    writer = state_writer(tmp_path)
    writer.keep(snapshot_of(1))
    writer.start()
    writer.wait()
    file = tmp_path / "state" / "step_1" / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UsageError, match="step_1 cannot be read.*delete it"):
        nft.read_state(file.parent, "live")


def test_settings_that_decide_results_may_not_change_on_resume(uninterrupted):
    done = start(small(uninterrupted, "--steps", 5, "--lr", "1e-4"))
    assert done.returncode == 2 and "--lr" in done.stderr and "--allow-change" in done.stderr
    assert len(metrics(uninterrupted)) == 4, "nothing is lost"


REFUSED = {
    "unknown option": (["--learning-rate", "1"], "--learning-rate"),
    "unknown recipe": (["--recipe", "big"], "big"),
    "no such folder": (["--model", "/nowhere"], "/nowhere"),
    "no such prompts": (["--train-prompts", "/nowhere.txt"], "--train-prompts"),
    "odd size": (["--height", "33"], "--height"),
    "no samples": (["--samples", "0"], "--samples"),
    "too many times": (["--train-times", "99"], "--train-times"),
    "unknown target": (["--lora-targets", "to_x"], "to_x"),
    "no OCR weights": (["--ocr-models", "/nowhere"], "/nowhere"),
    "odd name": (["--name", "a/b"], "a/b"),
    "no number": (["--lr", "fast"], "--lr"),
    "one sample": (["--samples", "1"], "--samples 1"),
    "no moving average": (["--adam-beta1", "1"], "--adam-beta1"),
    "prompts longer than allowed": (["--max-text", "6"], "--max-text 6"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_get_one_sentence(toy, tmp_path, capsys, case):
    extra, word = REFUSED[case]
    assert nft.main(small(tmp_path, *extra)) == 2
    message = capsys.readouterr().err
    assert word in message and message.count("\n") == 1 and "Traceback" not in message


@pytest.mark.parametrize("text, word", [("", "no prompt"), ("\n\n", "no prompt"),
                                        ('a "B"\nno quotes\n', "line 2")])
def test_bad_prompt_files_get_one_sentence(toy, tmp_path, capsys, text, word):
    (tmp_path / "prompts.txt").write_text(text)
    assert nft.main(small(tmp_path, "--test-prompts", tmp_path / "prompts.txt")) == 2
    message = capsys.readouterr().err
    assert word in message and "prompts.txt" in message and message.count("\n") == 1


def test_wrong_config_gets_one_sentence(toy, tmp_path, capsys):
    folder = shutil.copytree(toy, tmp_path / "model")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 4', '"num_layers": 5'))
    assert nft.main(small(tmp_path, "--model", folder)) == 2
    message = capsys.readouterr().err
    assert "num_layers" in message or "transformer_blocks.4" in message
    shutil.rmtree(folder / "vae")
    assert nft.main(small(tmp_path, "--model", folder)) == 2
    assert "vae" in capsys.readouterr().err


def test_a_run_goes_on_from_an_adapter(uninterrupted, tmp_path, capsys):
    file = uninterrupted / "run" / "lora" / "step_4"
    assert nft.main(small(tmp_path, "--steps", 0, "--init-lora", file, "--lora-alpha", 16)) == 0
    assert held_out(tmp_path, 0) == held_out(uninterrupted, 4), "the same prompts, seeds and policy"
    for extra, word in ((["--lora-rank", 8], "not --lora-rank 8"),
                        (["--lora-targets", "to_q"], "not a target")):
        assert nft.main(small(tmp_path / "other", "--steps", 0, "--init-lora", file, *extra)) == 2
        assert word in capsys.readouterr().err


def test_the_strength_of_a_first_adapter_is_kept(uninterrupted, tmp_path):
    file = uninterrupted / "run" / "lora" / "step_4" / nft.LORA_FILE
    state, alpha = nft.load_lora(file)
    first = nft.first_adapter(nft.make_config(small(tmp_path, "--init-lora", file, "--lora-alpha", 4)))
    for key, value in state.items():
        assert torch.equal(first[key], value * (alpha / 4 if ".lora_B." in key else 1))


def test_a_distilled_model_needs_consent_and_has_its_own_schedule(toy, tmp_path, capsys):
    folder = shutil.copytree(toy, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert nft.main(small(tmp_path, "--model", folder)) == 2
    message = capsys.readouterr().err
    assert "--allow-distilled" in message and message.count("\n") == 1
    c = nft.make_config(small(tmp_path, "--model", folder, "--allow-distilled", "--steps", 0))
    nft.train(c)
    assert "WARNING" in capsys.readouterr().out
    cpu = torch.device("cpu")
    for path, mu in ((folder, 1.15), (toy, None)):
        c.model = str(path)
        ends = nft.build_ends(c, path, [], cpu)
        engine = nft.build_engine(c, path, nft.build_policy(c, path, None, cpu), *ends)
        sample, = engine.generate([[Request('a sign that says "CAT"', seed=1)]], steps=5)
        assert torch.equal(sample.sigmas, nft.sigmas(5, 12, mu))
    del index["is_distilled"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert nft.is_distilled(folder, "krea/Krea-2-Turbo")
    assert not nft.is_distilled(folder, "/turbo/Krea-2-Raw/")


def test_a_model_of_the_hub_is_found_in_its_cache_offline(toy, tmp_path, monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="--model someone/Krea-2-Raw is not a folder here"):
        nft.pipeline_folder("someone/Krea-2-Raw")
    cached = tmp_path / "models--someone--Krea-2-Raw"
    shutil.copytree(toy, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    for model in ("someone/Krea-2-Raw", "someone/Krea-2-Raw@" + "0" * 40):
        assert nft.pipeline_folder(model) == cached / "snapshots" / ("0" * 40)
    with pytest.raises(UsageError, match="someone/Krea-2-Raw@other is not a folder here"):
        nft.pipeline_folder("someone/Krea-2-Raw@other")


@pytest.mark.parametrize("extra, word", [(["--model", "/nowhere"], "/nowhere"), (["--lr", "x"], "--lr")])
def test_ranks_say_a_mistake_once(toy, tmp_path, extra, word):
    done = start(small(tmp_path, *extra), ranks=2)
    said = [x for x in done.stderr.splitlines() if x.startswith("nft_krea2:")]
    assert done.returncode and len(said) == 1 and word in said[0]


def test_two_starts_of_one_run_do_not_mix(toy, tmp_path, capsys):
    with nft.lock_run(nft.make_config(small(tmp_path))):
        assert nft.main(small(tmp_path, "--fresh")) == 2
    assert "in use" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_refused_start_leaves_no_trace(uninterrupted, tmp_path, capsys):
    """Neither of a run that never began nor on one that did, even when asked to start over or to change."""
    bad = ["--lora-targets", "to_x"]
    assert nft.main(small(tmp_path, *bad)) == 2 and not (tmp_path / "run").exists()
    runs = tmp_path / "copy"
    shutil.copytree(uninterrupted, runs)
    before = {p: p.read_bytes() for p in runs.rglob("*") if p.is_file() and p.suffix != ".lock"}
    for extra, word in ((["--fresh", *bad], "to_x"), (["--allow-change", "--lora-rank", 8], "--lora-rank"),
                        (["--steps", 3], "beyond --steps 3"), (["--steps", 4, "--lr", 1], "--lr")):
        assert nft.main(small(runs, "--steps", 5, *extra)) == 2
        assert word in capsys.readouterr().err
        assert before == {p: p.read_bytes() for p in before}
    assert nft.main(small(runs, "--steps", 4)) == 0


@pytest.mark.parametrize("what", ["model", "train-prompts", "test-prompts"])
def test_a_run_does_not_go_on_with_other_contents_of_the_same_name(toy, tmp_path, capsys, what):
    folder = shutil.copytree(toy, tmp_path / "toy")
    prompts = {k: folder / f"prompts_{k.split('-')[0]}.txt" for k in ("train-prompts", "test-prompts")}
    again = small(tmp_path, "--model", folder, "--steps", 0,
                  *itertools.chain(*((f"--{k}", file) for k, file in prompts.items())))
    assert nft.main(again) == 0
    if what == "model":
        file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        save_file({k: v + 0.01 for k, v in tensors.items()}, file)
    else:
        prompts[what].write_text(prompts[what].read_text() + 'a sign that says "NEW"\n')
    assert nft.main(again) == 2
    assert f"contents of --{what}" in capsys.readouterr().err


def test_an_engine_is_awake_and_up_to_date_whenever_it_draws(toy, tmp_path, monkeypatch):
    """For rollouts, evaluations and pictures alike, with the policy that the step's number says."""
    drawn = []

    class Strict(TorchEngine):
        up = False

        def wake(self):
            assert not self.up
            self.up = True

        def sleep(self):
            assert self.up
            self.up = False

        def generate(self, units, steps):
            assert self.up
            drawn.append(self.version)
            return super().generate(units, steps)

    monkeypatch.setattr(nft, "TorchEngine", Strict)
    assert nft.main(small(tmp_path, "--steps", 2, "--record-every", 1)) == 0
    assert drawn == [0, 0, 1, 1, 2], "evaluation, rollout, pictures, rollout, evaluation"


def test_fresh_deletes_only_what_is_a_run(toy, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    assert nft.main(small(tmp_path, "--fresh")) == 2
    assert (tmp_path / "run" / "thesis.tex").exists() and "thesis" not in capsys.readouterr().out


def spoil(monkeypatch, bad) -> None:
    """Turn the reward of a submitted image into NaN where bad(count) holds."""
    submit, count = OCRReward.submit, itertools.count()

    def spoiled(pool, image, prompt):
        future, n = submit(pool, image, prompt), next(count)
        if bad(n):
            result = future.result()
            future = Future()
            future.set_result(dataclasses.replace(result, reward=math.nan))
        return future

    monkeypatch.setattr(OCRReward, "submit", spoiled)


def test_a_nan_reward_leaves_the_batch_and_is_counted(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, lambda n: n == 5)        # four evaluation images come first: the second of the rollout
    assert nft.main(small(tmp_path, "--steps", 1)) == 0
    assert metrics(tmp_path)[0]["reward/failed"] == 1 and math.isfinite(metrics(tmp_path)[0]["loss/nft"])


def test_too_many_failed_rewards_stop_the_run_and_lose_nothing(toy, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, lambda n: n >= 12)       # the second rollout
    assert nft.main(small(tmp_path, "--steps", 3)) == 1
    assert "step 1" in capsys.readouterr().err and nft.state_folders(tmp_path / "run")[-1][0] == 1


def test_a_latent_that_is_not_finite_stops_with_prompt_and_seed(toy):
    def draw(texts, seeds, steps):
        return torch.tensor([0.0, math.nan]).view(2, 1, 1).expand(2, 12, 64), nft.sigmas(steps, 12)

    engine = TorchEngine(draw, PromptEncoder(toy), ImageDecoder(toy), (2, 6))
    with pytest.raises(EngineError, match="(?s)TEN.*77"):
        list(engine.generate([[Request('a "CAT"', 1), Request('a "TEN"', 77)]], 4))


def test_a_loss_that_is_not_finite_stops_with_step_sample_and_prompt():
    x = Sample(Request('a "CAT"', 1, 0, 3), None, torch.zeros(12, 64), None, nft.sigmas(4, 12), 0)
    with pytest.raises(nft.TrainingError, match='(?s)step 7.*sample 3.*CAT'):
        nft.refuse_nonfinite(torch.tensor([math.inf]), [nft.Term(x, 0.5, 1)], 7)


def test_zero_spread_groups_are_counted_and_pull_nowhere():
    rewards = torch.tensor([[0.5, 0.5, 0.5], [0.0, 1.0, 0.5]])
    valid = torch.ones(2, 3, dtype=torch.bool)
    assert nft.zero_spread_groups(rewards, valid) == 1
    assert nft.reward_weight(nft.advantages(rewards))[0].tolist() == [0.5, 0.5, 0.5]


def test_every_rollout_image_has_its_own_seed_and_every_epoch_every_prompt():
    c = nft.make_config(["--recipe", "toy"])
    prompts = [f'a "{i}"' for i in range(26)]
    requests = [r for step in range(13) for r in nft.rollout_requests(c, prompts, step)]
    assert len({r.seed for r in requests}) == len(requests)
    used = [nft.prompt_at(i, 26, 0) for i in range(52)]
    assert sorted(used[:26]) == sorted(used[26:]) == list(range(26)) and used[:26] != used[26:]


def test_units_are_the_same_for_any_number_of_ranks():
    c = nft.make_config(["--recipe", "toy", "--rollout-batch", "5"])
    requests = nft.rollout_requests(c, ['a "B"', 'a "C"'], 0)
    alone = nft.deal(requests, c)
    for world in (2, 3, 16):
        dealt = [nft.deal(requests, dataclasses.replace(c, rank=r, world=world)) for r in range(world)]
        assert len({len(units) for units in dealt}) == 1, "or a rank would wait for ever"
        real = [u for units in dealt for u in units if not u[0].spare]
        assert sorted(real, key=lambda u: u[0].seed) == sorted(alone, key=lambda u: u[0].seed)


def test_the_reward_rises_on_words_that_were_never_trained_on(toy, tmp_path):
    """Measured: .417 -> .813 in 12 rollouts. The limit leaves half of the gain as a margin."""
    assert_good(start(settings(tmp_path, "--steps", 12, "--eval-samples", 2)))
    assert held_out(tmp_path, 12) > held_out(tmp_path, 0) + 0.2


def test_shuffled_rewards_teach_nothing(toy, tmp_path):
    """Measured: .417 -> .479; the mean of 48 images has a standard error of about .04."""
    assert_good(start(settings(tmp_path, "--steps", 12, "--eval-samples", 2, "--shuffle-rewards")))
    assert abs(held_out(tmp_path, 12) - held_out(tmp_path, 0)) < 0.15


# ----------------------------------------------------------------------------------------------------------
# The toy folder and the front door
# ----------------------------------------------------------------------------------------------------------

def test_diffusers_draws_the_toy_as_the_engine_does(toy):
    prompt, seed = 'a sign that says "HEN"', 5
    pipeline = Krea2Pipeline.from_pretrained(toy, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    noise = nft.initial_noise(seed, (2, 6), 64, torch.float32)
    theirs = pipeline(prompt=prompt, height=32, width=96, num_inference_steps=10, guidance_scale=0.0,
                      latents=noise, output_type="np").images[0]
    c = nft.make_config(["--recipe", "toy"])
    cpu = torch.device("cpu")
    ends = nft.build_ends(c, toy, [prompt], cpu)
    engine = nft.build_engine(c, toy, nft.build_policy(c, toy, None, cpu), *ends)
    ours = next(engine.generate([[Request(prompt, seed)]], 10)).image.numpy() / 255
    assert np.abs(theirs - ours).max() < 0.02


def test_the_front_door_refuses_what_it_does_not_know():
    for words, status in ((["nonsense"], 2), (["--help"], 0)):
        done = subprocess.run([ROOT / "launch.sh", *words], capture_output=True, text=True)
        assert done.returncode == status and "Traceback" not in done.stderr


def test_help_lists_every_setting():
    text = start(["--help"]).stdout
    for f in dataclasses.fields(nft.Config):
        assert ("--" + f.name.replace("_", "-") in text) == ("help" in f.metadata)
