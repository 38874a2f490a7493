"""Training of draft heads: seeds, resuming, what counts in the loss, and what is measured."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.errors import ExportError
from forerun_export.heads.acceptance import HeadDrafting, measure, tokens_a_call
from forerun_export.heads.batches import collate, forever
from forerun_export.heads.beginning import begin
from forerun_export.heads.features import Example, cache_features
from forerun_export.heads.lessons import Lesson, lessons, mean_rows
from forerun_export.heads.losses import cross_entropy, sharper
from forerun_export.heads.module import DraftHead, rms
from forerun_export.heads.other_drafts import LayersOutDrafting, NgramDrafting
from forerun_export.heads.pipeline import split
from forerun_export.heads.row_file import RowFile
from forerun_export.heads.teacher import Teacher
from forerun_export.heads.training import Schedule, Trained, Trainer
from forerun_export.heads.vocabulary import candidates, coverage, expected_counts
from helpers.head_training import random_answers, random_examples, random_lessons, tiny_teacher

TOKENS = torch.arange(0, 272, 2)
SCHEDULE = Schedule(steps=12, batch=3, unrolled=3, evaluate_every=4, patience=9, seed=5)


class StoppedError(Exception):
    """As an interrupt would stop training."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    return tiny_teacher(tmp_path_factory.mktemp("teacher"))


def _train(teacher: Teacher, folder: Path, *, stop_at: int = -1, schedule: Schedule = SCHEDULE) -> Trained:
    def watch(progress: object, _: object) -> None:
        if getattr(progress, "step", None) == stop_at:
            raise StoppedError

    folder.mkdir(parents=True, exist_ok=True)
    taught, examples = random_lessons(teacher, TOKENS, folder)
    return _trainer(teacher, taught[4:], examples[:4], schedule, folder).run(watch)


def _trainer(
    teacher: Teacher, taught: Sequence[Lesson], held_out: Sequence[Example], schedule: Schedule, folder: Path
) -> Trainer:
    return Trainer(teacher, TOKENS, taught, held_out, schedule, folder, lambda: begin(teacher, taught))


def _same(one: Trained, other: Trained) -> bool:
    return repr(one.best) == repr(other.best) and all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(teacher: Teacher, tmp_path: Path) -> None:
    first = _train(teacher, tmp_path / "first")
    assert _same(first, _train(teacher, tmp_path / "again"))
    assert not _same(first, _train(teacher, tmp_path / "other", schedule=replace(SCHEDULE, seed=6)))


@pytest.mark.parametrize("stop_at", [4, 8])
def test_a_run_that_was_stopped_ends_with_the_weights_of_an_unbroken_one(
    teacher: Teacher, tmp_path: Path, stop_at: int
) -> None:
    unbroken = _train(teacher, tmp_path / "unbroken")
    with pytest.raises(StoppedError):
        _train(teacher, tmp_path / "stopped", stop_at=stop_at)
    assert _same(unbroken, _train(teacher, tmp_path / "stopped"))


def test_a_checkpoint_of_other_options_or_a_damaged_one_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    _train(teacher, tmp_path)
    with pytest.raises(ExportError, match="with other options"):
        _train(teacher, tmp_path, schedule=replace(SCHEDULE, learning_rate=0.5))
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ExportError, match="is damaged; remove it"):
        _train(teacher, tmp_path)


def test_a_checkpoint_of_other_texts_or_candidates_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    taught, examples = random_lessons(teacher, TOKENS, tmp_path)
    _trainer(teacher, taught[4:], examples[:4], SCHEDULE, tmp_path).run(lambda *_: None)
    others = {
        "fewer texts": lambda: _trainer(teacher, taught[5:], examples[:4], SCHEDULE, tmp_path),
        "others watched": lambda: _trainer(teacher, taught[4:], examples[1:4], SCHEDULE, tmp_path),
        "other candidates": lambda: Trainer(
            teacher, TOKENS[:99], taught[4:], examples[:4], SCHEDULE, tmp_path, lambda: begin(teacher, taught)
        ),
    }
    for name, other in others.items():
        with pytest.raises(ExportError, match="of a training with other options or texts"):
            pytest.fail(f"{name}: {other()}")


def test_training_ends_early_when_held_out_acceptance_no_longer_grows(teacher: Teacher, tmp_path: Path) -> None:
    hopeless = replace(SCHEDULE, steps=400, learning_rate=0.0, patience=2, deep_from=0.0)
    trained = _train(teacher, tmp_path, schedule=hopeless)
    assert trained.steps == 4 * (1 + 2)
    assert trained.best.step == 4


def test_training_does_not_end_before_the_head_has_run_on_its_own_outputs(teacher: Teacher, tmp_path: Path) -> None:
    """A head that is trained further loses its second tokens while it learns first ones, and finds them again."""
    hopeless = replace(SCHEDULE, steps=400, learning_rate=0.0, patience=2, deep_from=0.05)
    trained = _train(teacher, tmp_path, schedule=hopeless)
    assert trained.steps == 20 + 4
    assert trained.best.step == 4


def test_a_head_learns_what_its_target_says(teacher: Teacher, tmp_path: Path) -> None:
    taught, examples = random_lessons(teacher, TOKENS, tmp_path)
    losses: list[float] = []
    schedule = replace(SCHEDULE, steps=60, evaluate_every=20)
    _trainer(teacher, taught, examples, schedule, tmp_path).run(lambda progress, _: losses.append(progress.loss))
    assert losses[2] < losses[1] < losses[0] - 0.03


def test_everything_behind_what_all_prompts_begin_with_is_learnt(teacher: Teacher, tmp_path: Path) -> None:
    alike = [replace(one, prompt=(5, 6, 7, 8, *one.prompt)) for one in random_answers(3)]
    examples = cache_features(teacher, alike, tmp_path)
    batch = collate(lessons(teacher, TOKENS, examples, tmp_path))
    for step in range(3):
        predicted = [[t + 2 for t in row.nonzero()[:, 0].tolist()] for row in batch.entries(step)]
        assert predicted == [list(range(4 + step, len(one.tokens))) for one in examples]
    assert batch.first == 3


def test_prompts_that_have_nothing_in_common_are_learnt_from_the_third_token_on(
    teacher: Teacher, tmp_path: Path
) -> None:
    taught, _ = random_lessons(teacher, TOKENS, tmp_path)
    assert {one.since for one in taught} == {2}


def test_batches_depend_on_seed_and_epoch_alone(teacher: Teacher, tmp_path: Path) -> None:
    taught, _ = random_lessons(teacher, TOKENS, tmp_path)

    def keys(seed: int, skip: int) -> list[list[str]]:
        following = forever(taught, batch=5, seed=seed, skip=skip)
        return [[one.example.key for one in next(following)] for _ in range(7)]

    assert keys(1, 4)[:3] == keys(1, 0)[4:]
    assert keys(1, 0) != keys(2, 0)
    epoch = [key for group in keys(1, 0)[:3] for key in group]
    assert sorted(epoch) == sorted(one.example.key for one in taught)


def test_the_loss_is_the_cross_entropy_of_both_laws_and_so_is_its_gradient() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 8, requires_grad=True), torch.randn(20, 8)
    laws, weights = torch.randn(300, 20).softmax(-1), torch.rand(300)
    found = cross_entropy(hidden, head, laws @ head)
    expected = -(laws * (hidden @ head.T).log_softmax(-1)).sum(-1)
    assert torch.allclose(found, expected, atol=1e-5)
    gradients = [torch.autograd.grad((losses * weights).sum(), hidden)[0] for losses in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_what_is_learnt_is_the_targets_likeliest_token(share: float) -> None:
    torch.manual_seed(0)
    final, head = torch.randn(300, 8), torch.randn(20, 8)
    laws = (final @ head.T).softmax(-1)
    likeliest = torch.nn.functional.one_hot(laws.argmax(-1), 20)
    moved = (1 - share) * laws + share * likeliest
    assert torch.allclose(sharper(laws @ head, final, head, share=share), moved @ head, atol=1e-5)


def test_the_share_of_the_schedule_is_learnt_of_the_token_behind_each_entry(teacher: Teacher, tmp_path: Path) -> None:
    taught, examples = random_lessons(teacher, TOKENS, tmp_path)
    batch, rows = collate(taught[4:7]), teacher.head[TOKENS]
    entries = batch.entries(0)
    laws = (teacher.final(batch.hidden[:, 1:-1][entries]) @ rows.T).softmax(-1)

    def aims(share: float) -> torch.Tensor:
        schedule = replace(SCHEDULE, greedy_share=share)
        return _trainer(teacher, taught[4:], examples[:4], schedule, tmp_path)._aims(batch)[entries].float()

    assert torch.allclose(aims(0.0), laws @ rows, atol=2e-2)
    learnt = torch.cdist(aims(1.0), rows).argmin(-1)
    # In bfloat16 two tokens may be level.
    assert (laws.gather(1, learnt[:, None])[:, 0] > 0.95 * laws.amax(-1)).all()


def test_mean_rows_are_those_of_the_targets_laws_and_computed_once(teacher: Teacher, tmp_path: Path) -> None:
    taught, examples = random_lessons(teacher, TOKENS, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("mean-rows-*")}
    again = lessons(teacher, TOKENS, examples, tmp_path)
    assert len(files) == 2
    assert all(path.read_bytes() == data for path, data in files.items())
    for one, same in zip(taught, again, strict=True):
        hidden = one.example.hidden
        law = (teacher.final(hidden) @ teacher.head[TOKENS].T).softmax(-1)
        expected = law @ teacher.head[TOKENS]
        assert torch.equal(one.mean_rows, same.mean_rows)
        assert torch.allclose(one.mean_rows[one.since - 1 :].float(), expected[one.since - 1 :], atol=2e-3)
        assert not one.mean_rows[: one.since - 1].any()


def test_mean_rows_of_other_candidates_are_made_anew(teacher: Teacher, tmp_path: Path) -> None:
    taught, examples = random_lessons(teacher, TOKENS, tmp_path)
    fewer = lessons(teacher, TOKENS[:50], examples, tmp_path)
    assert not torch.equal(fewer[0].mean_rows, taught[0].mean_rows)
    assert torch.equal(fewer[0].mean_rows, mean_rows(teacher, TOKENS[:50], examples[0].hidden, since=1))


def test_mean_rows_that_begin_later_are_no_others_mean_rows(teacher: Teacher, tmp_path: Path) -> None:
    """With prompts that have more in common, less of them is learnt: zeros stand there."""
    alike = [replace(one, prompt=(9, 8, 7, 6, *one.prompt)) for one in random_answers(4)]
    late = lessons(teacher, TOKENS, cache_features(teacher, alike, tmp_path), tmp_path)
    both = cache_features(teacher, [*alike, *random_answers(2, seed=1)], tmp_path)
    early = lessons(teacher, TOKENS, both, tmp_path)
    assert late[0].since > early[0].since
    assert early[0].mean_rows[early[0].since - 1 :].any(1).all()


def test_hidden_states_are_computed_once_and_give_the_targets_own_logits(teacher: Teacher, tmp_path: Path) -> None:
    answers = random_answers(6)
    cache_features(teacher, answers[:4], tmp_path)
    before = (tmp_path / "hidden.f16").read_bytes()
    examples = cache_features(teacher, answers, tmp_path)
    assert (tmp_path / "hidden.f16").read_bytes().startswith(before)
    for one in examples:
        expected = teacher.model(one.tokens[None]).logits[0]
        found = teacher.final(one.hidden) @ teacher.head.T
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()  # bfloat16 has 8 bits


def test_hidden_states_are_found_by_the_tokens_that_they_are_of(teacher: Teacher, tmp_path: Path) -> None:
    """Whatever number or kind a text has: other options number other texts."""
    answers = random_answers(3)
    first = cache_features(teacher, answers, tmp_path)
    data = (tmp_path / "hidden.f16").read_bytes()
    turned = cache_features(teacher, [replace(one, number=2 - one.number) for one in reversed(answers)], tmp_path)
    assert all(torch.equal(one.hidden, same.hidden) for one, same in zip(first, reversed(turned), strict=True))
    assert (tmp_path / "hidden.f16").read_bytes() == data
    (other,) = cache_features(teacher, [replace(answers[0], answer=(1, 2))], tmp_path)
    assert len(other.hidden) == len(answers[0].prompt) + 2


def test_texts_however_many_take_one_open_file(teacher: Teacher, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    examples = random_examples(teacher, tmp_path, 40)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(examples) == 40


class TestRowFiles:
    """Rows on disk."""

    ROWS = torch.arange(6).reshape(3, 2).half()

    def test_what_a_killed_run_left_half_written_is_cut_off(self, tmp_path: Path) -> None:
        index = tmp_path / "rows.jsonl"
        RowFile(tmp_path, "rows", 2).add("a", self.ROWS)
        whole = index.read_text()
        for left in (1, len(whole) // 2, len(whole) - 1):
            RowFile(tmp_path, "rows", 2).add("b", self.ROWS + 9)
            index.write_text(whole + index.read_text().removeprefix(whole)[:left])
            again = RowFile(tmp_path, "rows", 2)
            assert "b" not in again
            again.add("c", self.ROWS + 5)
            again = RowFile(tmp_path, "rows", 2)
            assert torch.equal(again.read("c"), self.ROWS + 5)
            assert torch.equal(again.read("a"), self.ROWS)
            index.write_text(whole)

    @pytest.mark.parametrize("index", ['{"text": "a"}\n', "{]\n", '[]\n{"text": "a", "row": 0, "rows": 3}\n'])
    def test_an_index_of_something_else_is_refused(self, tmp_path: Path, index: str) -> None:
        RowFile(tmp_path, "rows", 2).add("a", self.ROWS)
        (tmp_path / "rows.jsonl").write_text(index)
        with pytest.raises(ExportError, match=r"rows\.jsonl .*remove"):
            RowFile(tmp_path, "rows", 2)

    def test_rows_that_are_no_longer_there_are_missed(self, tmp_path: Path) -> None:
        RowFile(tmp_path, "rows", 2).add("a", self.ROWS)
        (tmp_path / "rows.f16").write_bytes(b"")
        with pytest.raises(ExportError, match=r"does not fit rows\.f16; remove both"):
            RowFile(tmp_path, "rows", 2)


class TestMeasures:
    """Of held-out answers."""

    def test_a_draft_that_is_the_target_itself_is_always_right(self, teacher: Teacher, tmp_path: Path) -> None:
        figures = measure(random_examples(teacher, tmp_path), LayersOutDrafting(teacher, ()), steps=3)
        for one in figures.values():
            assert all(rate > 0.75 for rate in one.greedy)  # bfloat16 flips what is nearly level
            assert all(rate > 0.95 for rate in one.overlap)

    def test_a_head_is_measured_by_drafting_one_token_at_a_time(self, teacher: Teacher, tmp_path: Path) -> None:
        head = DraftHead(teacher.model)
        example = random_examples(teacher, tmp_path)[0]
        found = HeadDrafting(head, teacher, TOKENS)(example, 2)
        law = (teacher.final(example.hidden) @ teacher.head.T)[example.begins - 1 : -1]
        hidden = example.hidden.float()[None]
        with torch.no_grad():
            a = head.unroll(hidden[:, :-1], teacher.embedding[example.tokens[1:]][None], steps=2)
        for step, output in enumerate(a):
            for place in range(len(law) - step):
                at = example.begins - 2 + place + step
                best = int(TOKENS[(head.norm(output[0, at - bool(step)]) @ teacher.head[TOKENS].T).argmax()])
                assert bool(found[step, place]) == (best == int(law[place + step].argmax())), (step, place)
        assert found[1, -1].isnan()

    @torch.no_grad()
    def test_an_overlap_is_the_probability_that_a_drawn_token_is_accepted(
        self, teacher: Teacher, tmp_path: Path
    ) -> None:
        head = DraftHead(teacher.model)
        example = next(one for one in random_examples(teacher, tmp_path) if one.temperature == 1)
        found = HeadDrafting(head, teacher, TOKENS)(example, 2)
        p = (teacher.final(example.hidden) @ teacher.head.T)[example.begins - 1 : -1].softmax(-1)
        embeddings = teacher.embedding[example.tokens[1:]][None]
        a = head.unroll(example.hidden.float()[None, :-1], embeddings, steps=2)
        for step, output in enumerate(a):
            for place in range(len(p) - step):
                at = example.begins - 2 + place + step
                q = torch.zeros(len(teacher.head))
                q[TOKENS] = (head.norm(output[0, at - bool(step)]) @ teacher.head[TOKENS].T).softmax(-1)
                assert found[step, place] == pytest.approx(float(torch.minimum(p[place + step], q).sum()), abs=1e-4)

    def test_tokens_a_call_walks_the_text_as_it_is_decoded(self) -> None:
        matches = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, torch.nan]])
        # With 2 drafted: 3 from place 0, 2 from place 3 (its second step matches too, but the text ends: 3).
        assert tokens_a_call([matches], 2) == pytest.approx(6 / 2)
        assert tokens_a_call([matches], 1) == pytest.approx(6 / 4)

    def test_ngrams_are_right_where_a_text_repeats_itself(self, teacher: Teacher, tmp_path: Path) -> None:
        (answer,) = random_answers(1)
        (example,) = cache_features(teacher, [replace(answer, prompt=(7, 8, 9), answer=(20, 7, 8, 9, 20, 7))], tmp_path)
        values = NgramDrafting(teacher)(example, 2)
        assert values[0, 0] == 0  # nothing in the prompt comes twice
        assert values[1, 0].isnan()
        assert not values[0, 2:].isnan().any()


def test_candidates_are_the_tokens_of_the_largest_counts_and_those_that_must_be_there() -> None:
    counts = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, 9.0, 4.0])
    assert candidates(counts, count=3, always=[1]) == [1, 5, 6]
    assert candidates(counts, count=4, always=[1, 5, 99]) == [1, 2, 5, 6]
    assert candidates(counts, count=50, always=[]) == list(range(7))
    assert coverage([[5, 5, 6], [2]], [5, 2]) == pytest.approx(3 / 4)


def test_a_token_counts_by_the_targets_law_where_it_was_not_drawn(teacher: Teacher, tmp_path: Path) -> None:
    examples = random_examples(teacher, tmp_path)
    counts = expected_counts(teacher, examples)
    laws = [(teacher.final(one.hidden) @ teacher.head.T).softmax(-1)[one.begins - 1 : -1] for one in examples]
    expected = torch.cat(laws).sum(0)
    assert counts.sum() == pytest.approx(sum(len(one.tokens) - one.begins for one in examples), rel=1e-3)
    assert torch.allclose(counts, expected, rtol=0.1, atol=0.02)


def test_a_head_begins_better_than_noise(teacher: Teacher, tmp_path: Path) -> None:
    """Its join is the least-squares guess of what the target's last layer reads."""
    taught, examples = random_lessons(teacher, TOKENS, tmp_path, 40)
    head, errors = begin(teacher, taught), []
    for weight in (head.join.weight, torch.zeros_like(head.join.weight)):
        total = 0.0
        for one in examples:
            (reads,) = teacher.outputs([one.tokens.tolist()], (2,), bfloat16=False)
            embeddings = rms(teacher.embedding[one.tokens], teacher.epsilon)
            inputs = torch.cat((embeddings[1:], one.hidden[:-1, 96:].float()), 1)
            total += float((inputs @ weight.T - reads[0, 1:]).detach()[one.begins - 2 :].square().sum())
        errors.append(total)
    assert errors[0] < 0.7 * errors[1]


def test_no_prompt_is_both_trained_on_and_measured_on(teacher: Teacher, tmp_path: Path) -> None:
    answers = random_answers(40)
    twice = [*answers, *(replace(one, number=one.number + 40, answer=(*one.answer, 3)) for one in answers)]
    training, watched = split(cache_features(teacher, twice, tmp_path), seed=1)
    of_training, of_watched = (
        {tuple(one.tokens[: one.begins].tolist()) for one in side} for side in (training, watched)
    )
    assert not of_training & of_watched
    assert len(watched) == 2 * len(of_watched)
    assert len(training) + len(watched) == 80
