"""`forerun certify` on lookup-table engines: sound ones pass, broken ones fail with the finding that tells why."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import onnx_ir
import pytest
from click.testing import CliRunner, Result

import forerun
from forerun.cli import main
from forerun.manifest import Quantization
from forerun.oracle import keyed_draw, law_of
from forerun.randomness import noise_keys
from forerun_export.certify import PARTS, certify, explain
from forerun_export.certify.engines import EngineLaws, Split, draw, first_split, g_test, naive_score
from forerun_export.certify.equality import Rescored, gap, rescored
from forerun_export.certify.explain import P, Q, emitted, fixed_point, residual_law, usual_ratio, variation
from forerun_export.certify.graph_sets import FreshGraphs
from forerun_export.certify.graphs import CHECKS, tally
from forerun_export.certify.report import Certificate, Finding, whose_law
from forerun_export.certify.statistics import SIGNIFICANCE
from forerun_export.certify.wrong_graphs import WRONG_GRAPHS
from forerun_export.sampling import sampling_model
from forerun_export.sampling.controls import plain_law
from helpers.table_models import engine_directory, random_model, sampling_graphs

VOCABULARY = 8
TARGET = random_model(31, vocabulary=VOCABULARY, spread=1.0)
DRAFT = random_model(32, vocabulary=VOCABULARY, spread=1.0)
PROMPT = "w1"
SAMPLES, FEW = 1500, 400


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_directory(tmp_path_factory.mktemp("sound") / "engines", TARGET, DRAFT, batch=32)


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines whose verification draws from p after a rejection."""
    folder = tmp_path_factory.mktemp("naive")
    sampling = Path(shutil.copytree(sampling_graphs(VOCABULARY), folder / "sampling"))
    wrong = sampling_model(WRONG_GRAPHS["draw from p after a rejection"], VOCABULARY)
    (sampling / "verify-residual.onnx").unlink()
    onnx_ir.save(wrong, sampling / "verify-residual.onnx")
    return engine_directory(folder / "engines", TARGET, DRAFT, batch=32, sampling=sampling)


@pytest.fixture(scope="module")
def certificate(sound: Path) -> Certificate:
    return certify(sound, samples=FEW, prompts=[PROMPT])


def test_sound_engines_pass_every_part(certificate: Certificate) -> None:
    assert certificate.failures == []
    assert certificate.passed
    assert {finding.part for finding in certificate.findings} == set(PARTS)


def test_every_mutant_is_listed_and_caught(certificate: Certificate) -> None:
    found = {str(one.numbers["mutant"]): one.status for one in certificate.findings if one.part == "mutants"}
    assert len(found) == 11
    assert set(found.values()) == {"pass"}


def test_every_finding_states_its_power_and_becomes_json(certificate: Certificate) -> None:
    data = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert all(finding["power"] and finding["figure"] for finding in data["findings"])


def failures(certificate: Certificate) -> list[tuple[str, str]]:
    return [(finding.part, finding.shown.partition(":")[0]) for finding in certificate.failures]


def test_a_wrong_graph_in_the_directory_fails_against_the_oracle(naive: Path) -> None:
    assert failures(certify(naive, parts=["graphs"], samples=FEW)) == [("graphs", "verify-residual")]


def test_a_wrong_graph_in_the_directory_fails_end_to_end(naive: Path) -> None:
    found = certify(naive, parts=["engines"], samples=SAMPLES, prompts=[PROMPT])
    assert failures(found) == [("engines", "residual")] * 2  # the G-test and the score toward that rule


def test_filters_that_are_not_applied_are_no_rounding() -> None:
    found = tally(CHECKS["law-filtered"], [FreshGraphs(7, {"law-filtered": plain_law})], rows=16, rounds=1)
    assert found.unexplained > found.cases / 10


def test_the_table_names_what_failed_and_the_exit_code_is_1(naive: Path) -> None:
    result = run("certify", naive, "--parts", "graphs", "--samples", FEW)
    assert result.exit_code == 1
    assert "BUG" in result.stdout
    assert "1 of 13 FAILED" in result.stdout.splitlines()[-1]


def test_json_is_the_last_line(sound: Path) -> None:
    result = run("certify", sound, "--parts", "enumeration", "--json", "--samples", FEW)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["passed"] is True
    assert {"part", "shown", "figure", "power", "status"} <= found["findings"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "graphs,moon"], "unknown part 'moon'; known: enumeration, graphs, engines, mutants"),
        (["--samples", "-3"], "samples is -3"),
    ],
)
def test_mistakes_are_one_line(sound: Path, arguments: list[str], said: str) -> None:
    result = run("certify", sound, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr.splitlines()[-1]


def test_nothing_to_do_is_a_usage_error() -> None:
    result = run("certify")
    assert result.exit_code == 2
    assert "--explain" in result.stderr


def test_explain_needs_no_directory_and_its_numbers_follow_from_the_laws() -> None:
    assert run("certify", "--explain").stdout == explain() + "\n"
    ratio, accepted = usual_ratio(P, Q), Fraction(7, 10)
    naive = emitted(P, Q, ratio, P)
    assert naive == [min(p, q) + (1 - accepted) * p for p, q in zip(P, Q, strict=True)]
    assert variation(naive, P) == Fraction(3, 20)
    assert emitted(P, Q, ratio, residual_law(P, Q)) == list(P)
    a = fixed_point(P, Q)
    assert a == sum(min(q, a * p) for p, q in zip(P, Q, strict=True)) == Fraction(2, 5)
    assert emitted(P, Q, [a * p / q for p, q in zip(P, Q, strict=True)], P) == list(P)
    for number in ("3/20 = 0.15", "2/5 = 0.4", "Biased.", "Exact."):
        assert number in explain()


@pytest.fixture(scope="module")
def decoder(sound: Path) -> Iterator[forerun.Decoder]:
    with forerun.open(sound) as decoder:
        yield decoder


def test_the_law_that_samples_are_held_to_is_the_targets(decoder: forerun.Decoder) -> None:
    for context in ((1,), (1, 5), (3, 0, 7, 7)):
        law = EngineLaws(decoder, decoder.manifest.target)(context)
        assert law == pytest.approx(law_of(TARGET.logits(context), 1.0), abs=1e-12)


def test_the_sample_sees_the_naive_rule_and_says_so(decoder: forerun.Decoder, naive: Path) -> None:
    target = EngineLaws(decoder, decoder.manifest.target)
    assert decoder.manifest.draft is not None
    draft = EngineLaws(decoder, decoder.manifest.draft)
    right = draw(decoder, [(1,)], "residual", samples=SAMPLES)
    assert naive_score(right, target, draft).smallest_share < 0.9  # a bias of nine tenths of the rule's is promised
    with forerun.open(naive) as biased:
        wrong = draw(biased, [(1,)], "residual", samples=SAMPLES)
    assert naive_score(wrong, target, draft).p_value < SIGNIFICANCE
    assert g_test(wrong, target).p_value < SIGNIFICANCE < g_test(right, target).p_value


def test_a_difference_is_a_tie_only_within_the_kernels_error() -> None:
    split = first_split((1, 2), (5, 6, 7), (5, 4, 7), None)
    assert split == Split((1, 2, 5), 6, 4, None)
    assert first_split((1,), (5, 6), (5, 6), None) is None
    logits = [0.0] * 4 + [2.0, 0.0, 2.0 + 1e-5]
    assert Rescored(split, gap(logits, split), 1e-5).is_tie
    assert not Rescored(split, gap(logits, split), 1e-6).is_tie
    other_is_best = [9.0, *logits[1:]]
    assert not Rescored(split, gap(other_is_best, split), 1e-5).is_tie


def test_a_difference_of_keyed_draws_is_a_tie_only_within_the_kernels_error() -> None:
    logits, keys = [float(x) for x in range(8)], noise_keys(7)
    taken = keyed_draw(law_of(logits, 1.0), keys, 2)
    other = max((x for x in range(2, 8) if x != taken), key=lambda x: -gap(logits, Split((1, 2), taken, x, 7)))
    behind = gap(logits, Split((1, 2), taken, other, 7))
    assert gap(logits, Split((1, 2), taken, taken, 7)) == 0 < behind
    assert not Rescored(Split((1, 2), taken, other, 7), behind, 1e-4).is_tie
    logits[other] += behind - 1e-6
    split = Split((1, 2), taken, other, 7)
    assert Rescored(split, gap(logits, split), 1e-4).is_tie


def test_an_output_that_only_ends_earlier_is_no_tie() -> None:
    split = first_split((1,), (5, 6), (5,), None)
    assert split is not None
    assert not Rescored(split, gap([0.0] * 8, split), 1e9).is_tie


def test_a_certificate_without_failures_passes_though_a_mutant_is_below_its_power() -> None:
    finding = Finding(part="mutants", shown="x", figure="x", power="x", status="below power")
    found = Certificate("x", [finding], 1.0, "The law of the target.")
    assert found.passed
    assert "1 of them not shown or below the power" in found.render()


def test_a_certificate_says_whose_law_it_is_about(certificate: Certificate, decoder: forerun.Decoder) -> None:
    assert "float32 engine" in certificate.render()
    target = decoder.manifest.target
    cost = Quantization({"int8": 3}, 100, 400, 50, 8.5, 8.25, 0.9, 0.01)
    told = whose_law(replace(target, precision="int8", quantization=cost))
    assert told.startswith("The target's law is that of its int8 engine, not of the checkpoint")
    assert "perplexity 8.50 instead of 8.25" in told


def test_no_rounding_excuses_a_difference_of_a_quantized_target(decoder: forerun.Decoder) -> None:
    """The checkpoint's law is not its law; and its rows are bit-identical."""
    quantized = replace(decoder.manifest.target, precision="int8")
    assert rescored(quantized, Split((1, 2), plain=3, speculative=4, seed=None)) is None
