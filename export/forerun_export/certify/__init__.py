"""`forerun certify`: evidence that speculation changes nothing but the speed, and how strong that evidence is.

enumeration   the laws of acceptance, exactly, in float64
graphs        the sampling graphs against the oracle, case by case
engines       the built engines end to end: sampled output against the target's law, equality with plain decoding
mutants       rules that look right and are not, each of which one of the checks above must catch
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import forerun
from forerun.errors import RequestError
from forerun_export.certify.engines import sampled
from forerun_export.certify.enumeration import enumeration
from forerun_export.certify.equality import PROMPTS, equality
from forerun_export.certify.explain import explain
from forerun_export.certify.graph_sets import BuiltGraphs
from forerun_export.certify.graphs import graphs
from forerun_export.certify.mutants import mutants
from forerun_export.certify.report import Certificate, Finding, whose_law
from forerun_export.progress import Report, silent

PARTS = ("enumeration", "graphs", "engines", "mutants")
SAMPLES = 1500
__all__ = ["PARTS", "SAMPLES", "Certificate", "Finding", "certify", "explain"]


def certify(
    directory: Path,
    *,
    parts: Sequence[str] = PARTS,
    samples: int = SAMPLES,
    prompts: Sequence[str] = (),
    report: Report = silent,
) -> Certificate:
    """Run the parts on an engine directory.

    `samples`: sampled sequences for each law of acceptance; with it the random cases of the other parts grow.
    `prompts`: texts to use in place of the default ones, as they stand for the sampled tokens and as a user's
    messages for equality with plain decoding.

    Raises RequestError for an unknown part or a number that means nothing, EngineError for a directory that cannot
    be used. What does not hold is no error but a finding whose status is `fail`.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise RequestError(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    if samples < 1:
        raise RequestError(f"samples is {samples}; give a whole number of at least 1")
    started = time.perf_counter()
    with forerun.open(directory) as decoder:
        steps: Mapping[str, Callable[[], Iterator[Finding]]] = {
            "enumeration": lambda: enumeration(seeds=max(1, min(4, samples // 375)), report=report),
            "graphs": lambda: graphs(
                BuiltGraphs(decoder.directory.path, decoder.manifest), rounds=max(1, samples // 750), report=report
            ),
            "engines": lambda: _engines(decoder, samples, prompts, report),
            "mutants": lambda: mutants(decoder, samples=samples, report=report),
        }
        law = whose_law(decoder.manifest.target)
        findings = [finding for part in PARTS if part in parts for finding in steps[part]()]
    return Certificate(str(directory), findings, time.perf_counter() - started, law)


def _engines(decoder: forerun.Decoder, samples: int, prompts: Sequence[str], report: Report) -> Iterator[Finding]:
    yield from equality(decoder, prompts or PROMPTS, report=report)
    yield from sampled(decoder, prompts, samples=samples, report=report)
