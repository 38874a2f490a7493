"""Training a draft head: its own outputs unrolled for several steps against the target's law.

That law is taken sharper than it is, a share of it moved to its likeliest token. Greedy rounds live by that one, and
a head too small to follow a law everywhere gains more of sum min(p, q) at its peak than in its width.

Matrices are trained by Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), norms by AdamW.
"""

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import ExportError
from forerun_export.heads.acceptance import HeadDrafting, measure
from forerun_export.heads.batches import Batch, collate, forever
from forerun_export.heads.features import Example
from forerun_export.heads.folder import HeadFigures
from forerun_export.heads.lessons import Lesson
from forerun_export.heads.losses import cross_entropy, sharper
from forerun_export.heads.module import DraftHead
from forerun_export.heads.teacher import Teacher

CHECKPOINT_NAME = "checkpoint.pt"
NORMS_SHARE = 0.3  # of the learning rate of matrices


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a head is trained.

    `steps` of the optimizers, each on `batch` texts. From `deep_from` (a share of the steps) on, the head runs
    `unrolled` drafting steps, all but the first on its own outputs, the loss of each weighing `falling` times that of
    the one before; until then one step, which costs less than half and is what the others build on. `greedy_share` of
    what is learnt is the token that the target's law over the head's tokens has as its likeliest, the rest that law.
    The learning rate is that of the matrices; it rises for a twentieth of the steps and then falls along a half cosine
    to a tenth. Norms take NORMS_SHARE of it. Every `evaluate_every` steps acceptance is measured, and training ends
    early after `patience` measurements at full depth without a better one. `start` names the head that training goes
    on from, if it does.
    """

    steps: int
    batch: int = 8
    unrolled: int = 3
    deep_from: float = 0.7
    falling: float = 0.8
    greedy_share: float = 0.5
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    largest_gradient: float = 1.0
    evaluate_every: int = 100
    patience: int = 5
    seed: int = 0
    start: str = ""

    def depth(self, step: int) -> int:
        """How many drafting steps the head runs, after `step` steps of the optimizer."""
        return self.unrolled if step >= self.deep_from * self.steps else 1

    def rate(self, step: int) -> float:
        """The learning rate of the step that follows `step` others."""
        warm_up = max(1, self.steps // 20)
        rising = min(1.0, (step + 1) / warm_up)
        falling = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps))
        return self.learning_rate * rising * falling


@dataclass(frozen=True)
class Progress:
    """One measurement: the mean loss since the last one, and the figures of held-out answers by kind."""

    step: int
    loss: float
    figures: Mapping[str, HeadFigures]

    @property
    def score(self) -> float:
        """What is to become larger: the expected number of accepted tokens of a round, meant over kinds and laws."""
        lengths = [
            _accepted(rates)
            for figures in self.figures.values()
            for rates in (figures.greedy, figures.overlap)
            if rates
        ]
        return sum(lengths) / len(lengths)


def _accepted(rates: Sequence[float]) -> float:
    """Where no answer is long enough for a step there is no rate of it, and nothing is accepted."""
    known = [0.0 if math.isnan(rate) else rate for rate in rates]
    return sum(math.prod(known[: step + 1]) for step in range(len(known)))


class Watch(Protocol):
    """Told of every measurement while training runs."""

    def __call__(self, progress: Progress, schedule: Schedule) -> None:
        """Take note."""


@dataclass(frozen=True)
class Trained:
    """The best weights found, the measurement that found them, and how many steps were taken."""

    weights: Mapping[str, Tensor]
    best: Progress
    steps: int


class Trainer:
    """One head in training; its state lies in `folder` after every measurement, and is taken up from there.

    Where the folder has no state, `begin` makes the head.
    """

    def __init__(
        self,
        teacher: Teacher,
        tokens: Tensor,
        training: Sequence[Lesson],
        held_out: Sequence[Example],
        schedule: Schedule,
        folder: Path,
        begin: Callable[[], DraftHead],
    ) -> None:
        if not training or not held_out:
            raise ExportError("too few answers to train on and to hold out; give more prompts")
        self._teacher, self._tokens, self._schedule = teacher, tokens, schedule
        self._training, self._held_out, self._folder = training, held_out, folder
        begun = (folder / CHECKPOINT_NAME).exists()
        self.head = DraftHead(teacher.model).float().to(teacher.device) if begun else begin()
        self._weights = list(self.head.parameters())
        self._threads = ThreadPoolExecutor(2)
        self._optimizers = _optimizers(self._weights, schedule.weight_decay)
        self._rows = teacher.head[tokens].to(torch.bfloat16)
        self._texts = _digest(tokens, training, held_out)
        self._step, self._loss, self._worse = 0, 0.0, 0
        self._best: tuple[Progress, Mapping[str, Tensor]] | None = None
        self._take_up()

    def run(self, watch: Watch) -> Trained:
        """Train to the end of the schedule, or until held-out acceptance has stopped growing."""
        schedule = self._schedule
        data = forever(self._training, batch=schedule.batch, seed=schedule.seed, skip=self._step)
        while self._step < schedule.steps and self._worse < schedule.patience:
            self._loss += self._update(next(data))
            self._step += 1
            if self._step % schedule.evaluate_every == 0 or self._step == schedule.steps:
                watch(self._measure(), schedule)
        assert self._best is not None
        return Trained(self._best[1], self._best[0], self._step)

    def _update(self, texts: Sequence[Lesson]) -> float:
        """A step of the optimizers; gives the loss of the first drafted token."""
        # In halves, each on a thread of its own: that keeps two processors busier than each product split in two.
        middle = (len(texts) + 1) // 2
        halves = [half for half in (texts[:middle], texts[middle:]) if half]
        with _half_the_threads():
            found = list(self._threads.map(self._gradients, halves))
        for number, weight in enumerate(self._weights):
            weight.grad = torch.stack([gradients[number] for _, gradients in found]).mean(0)
        torch.nn.utils.clip_grad_norm_(self._weights, self._schedule.largest_gradient)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._schedule.rate(self._step) * group["share"]
            optimizer.step()
        return sum(loss for loss, _ in found) / len(found)

    def _gradients(self, texts: Sequence[Lesson]) -> tuple[float, Sequence[Tensor]]:
        """The loss of the first drafted token, and the gradient of all losses by each weight."""
        batch = collate(texts).to(self._teacher.device)
        # Kept casts are shared by threads, and dropped when one ends: sums would then depend on the clock.
        with torch.autocast(self._teacher.device.type, torch.bfloat16, cache_enabled=False):
            losses = list(self._losses(batch))
        shares = torch.tensor([self._schedule.falling**step for step in range(len(losses))])
        loss = torch.stack(losses) @ (shares / shares.sum()).to(losses[0].device)
        return float(losses[0].detach()), torch.autograd.grad(loss, self._weights)

    def _losses(self, batch: Batch) -> Iterator[Tensor]:
        """Of each unrolled step, the mean cross-entropy of the sharper law over the head's tokens."""
        first, aims = batch.first, self._aims(batch)
        embeddings = self._teacher.embedding[batch.tokens[:, 1:-1]]
        depth = self._schedule.depth(self._step)
        outputs = self.head.unroll(batch.hidden[:, :-2].float(), embeddings, steps=depth, first=first)
        for step, output in enumerate(outputs):
            entries = batch.entries(step)
            a = self.head.norm(output[entries[:, first if step else 0 :]]).bfloat16()
            if len(a):  # a text of two tokens has no third step
                yield cross_entropy(a, self._rows, aims[entries]).mean()

    def _aims(self, batch: Batch) -> Tensor:
        """The mean rows [B,T-2,h] of what entries are to learn."""
        aims, entries = batch.mean_rows[:, 1:-1].clone(), batch.entries(0)
        final = self._teacher.final(batch.hidden[:, 1:-1][entries])
        aims[entries] = sharper(aims[entries], final, self._rows, share=self._schedule.greedy_share)
        return aims

    def _measure(self) -> Progress:
        schedule = self._schedule
        since = (self._step - 1) % schedule.evaluate_every + 1
        drafting = HeadDrafting(self.head, self._teacher, self._tokens)
        figures = measure(self._held_out, drafting, steps=schedule.unrolled + 1)
        progress = Progress(self._step, self._loss / since, figures)
        self._loss = 0.0
        if self._best is None or progress.score > self._best[0].score:
            weights = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
            self._best, self._worse = (progress, weights), 0
        elif schedule.depth(self._step) == schedule.unrolled:
            # Until then only first tokens are learnt, and a head that began with good ones behind them forgets these.
            self._worse += 1
        self._keep()
        return progress

    def _keep(self) -> None:
        assert self._best is not None
        progress, weights = self._best
        state = {
            "schedule": asdict(self._schedule),
            "texts": self._texts,
            "step": self._step,
            "worse": self._worse,
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "best": {
                "step": progress.step,
                "loss": progress.loss,
                "figures": {kind: asdict(figures) for kind, figures in progress.figures.items()},
                "weights": dict(weights),
            },
        }
        temporary = self._folder / f".{CHECKPOINT_NAME}.part"
        whole = io.BytesIO()
        torch.save(state, whole)  # which tells a full disk, where it writes itself, from nothing else
        temporary.write_bytes(whole.getbuffer())
        os.replace(temporary, self._folder / CHECKPOINT_NAME)

    def _take_up(self) -> None:
        path = self._folder / CHECKPOINT_NAME
        if not path.exists():
            return
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self._teacher.device)
        except Exception as error:  # torch raises whatever the damage brings about
            raise ExportError(f"{path} is damaged; remove it, and training begins anew") from error
        if (state["schedule"], state["texts"]) != (asdict(self._schedule), self._texts):
            raise ExportError(f"{path} is of a training with other options or texts; give those again, or remove it")
        self.head.load_state_dict(state["head"])
        for optimizer, its_state in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        self._step, self._worse = state["step"], state["worse"]
        best = state["best"]
        figures = {
            kind: HeadFigures(**{name: tuple(rates) for name, rates in one.items()})
            for kind, one in best["figures"].items()
        }
        weights = {name: tensor.cpu() for name, tensor in best["weights"].items()}
        self._best = Progress(best["step"], best["loss"], figures), weights


@contextlib.contextmanager
def _half_the_threads() -> Iterator[None]:
    """For each product, because two halves of a batch are worked on at a time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _digest(tokens: Tensor, training: Sequence[Lesson], held_out: Sequence[Example]) -> str:
    """A name for just these texts and candidates."""
    texts = [(one.example.key, one.since) for one in training], [(one.key, one.temperature) for one in held_out]
    return hashlib.sha256(repr((tokens.tolist(), texts)).encode()).hexdigest()


def _optimizers(weights: Sequence[Tensor], weight_decay: float) -> tuple[torch.optim.Optimizer, ...]:
    """Each with a `share` of the learning rate. Only matrices decay."""
    matrices = {"params": [weight for weight in weights if weight.dim() == 2], "share": 1.0}
    norms = {"params": [weight for weight in weights if weight.dim() != 2], "share": NORMS_SHARE}
    return (
        # Steps of matrices as large as AdamW's would be (Liu et al. 2502.16982): one rate means the same to both.
        torch.optim.Muon([matrices], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([norms], betas=(0.9, 0.95), weight_decay=0.0),
    )
