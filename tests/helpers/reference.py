"""What a decoder must say, computed token by token in plain Python, without caches, batches or graphs.

    request     its prompt and its bad words are token ids; stop texts are not known here
    output      the tokens said so far, the drafted ones among them
    ends        end tokens, the one that an end is forced with first

Each law is computed from all of the tokens before it: nothing is carried along from place to place.
"""

import math
from collections.abc import Iterator, Sequence

from forerun import Request
from forerun.oracle import (
    Law,
    Tokens,
    argmax,
    block_step,
    filtered_law,
    inverse_cdf,
    keyed_draw,
    law_of,
    residual_step,
)
from forerun.randomness import Stream, noise_keys, uniforms
from helpers.table_models import TableModel

DEFAULT_DRAFT_LENGTH = 4


class NothingLeftError(Exception):
    """Every token is banned."""


def greedy(target: TableModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` tokens that plain decoding at temperature 0 emits."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(argmax(target.logits(tokens)))
    return tuple(tokens[len(prompt) :])


def sampled(
    target: TableModel,
    draft: TableModel,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float,
    seed: int,
    draft_length: int,
) -> tuple[int, ...]:
    """The `count` tokens of law `residual` with this seed; they depend on K, and on nothing else."""
    controls = {"temperature": temperature, "seed": seed, "draft_length": draft_length}
    return decoded(target, draft, Request.of(prompt, law="residual", max_new_tokens=count, **controls))


def decoded(target: TableModel, draft: TableModel, request: Request, *, ends: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens of a request with a seed. Under `greedy` and `coupled` the draft is not looked at: that is plain.

    Raises NothingLeftError where all tokens are banned, even behind a proposal that would not be kept.
    """
    output: list[int] = []
    while True:
        for token in _round(target, draft, request, output, ends):
            output.append(token)
            if token in ends or token in request.controls.stop_tokens or _room(target, request, output) == 0:
                return tuple(output)


def law_at(
    model: TableModel, request: Request, output: Sequence[int], *, ends: Sequence[int] = (), room: int = 2
) -> Law:
    """The law of the next token after every control; `room` is how many tokens may still come."""
    controls = request.controls
    logits = edited_logits(model.logits([*request.prompt, *output]), request, output, ends=ends, last=room == 1)
    if max(logits) == -math.inf:
        raise NothingLeftError
    return filtered_law(logits, controls.temperature, top_k=controls.top_k, top_p=controls.top_p, min_p=controls.min_p)


def edited_logits(
    logits: Sequence[float],
    request: Request,
    output: Sequence[int],
    *,
    ends: Sequence[int] = (),
    last: bool = False,
) -> list[float]:
    """Logits after bias, penalties and bans, each from its definition; `last`: the sequence must end here."""
    controls, said = request.controls, [*request.prompt, *output]
    if last and controls.force_end:
        return [logit if token == ends[0] else -math.inf for token, logit in enumerate(logits)]
    wanted = {token for token, bias in controls.logit_bias.items() if bias == math.inf}
    edited = []
    for token, logit in enumerate(logits):
        bias = controls.logit_bias.get(token, 0.0)
        if bias == -math.inf or (wanted and token not in wanted) or _is_banned(token, request, output, ends):
            edited.append(-math.inf)
            continue
        logit += 0.0 if wanted else bias
        if token in said:
            penalty = controls.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        if (count := output.count(token)) > 0:
            logit -= controls.presence_penalty + controls.frequency_penalty * count
        edited.append(logit)
    return edited


def joint_law(
    model: TableModel, request: Request, *, ends: Sequence[int] = (), output: Tokens = ()
) -> dict[Tokens, float]:
    """The law of a request's whole output in plain decoding, as probabilities of the outputs that can be."""
    room = _room(model, request, output)
    if room == 0 or not set(output[-1:]).isdisjoint(ends):
        return {output: 1.0}
    law = law_at(model, request, output, ends=ends, room=room)
    return {
        whole: probability * rest
        for token, probability in enumerate(law)
        if probability > 0
        for whole, rest in joint_law(model, request, ends=ends, output=(*output, token)).items()
    }


def logprobs_at(
    model: TableModel, request: Request, output: Sequence[int], *, ends: Sequence[int] = (), room: int = 2
) -> list[float]:
    """Logarithms of the law that log-probabilities are told of: at temperature 0 that of temperature 1, unfiltered."""
    if request.controls.temperature > 0:
        law = law_at(model, request, output, ends=ends, room=room)
    else:
        logits = model.logits([*request.prompt, *output])
        law = law_of(edited_logits(logits, request, output, ends=ends, last=room == 1), 1.0)
    return [math.log(p) if p > 0 else -math.inf for p in law]


def _is_banned(token: int, request: Request, output: Sequence[int], ends: Sequence[int]) -> bool:
    controls, then = request.controls, (*request.prompt, *output, token)
    if len(output) < controls.min_new_tokens and (token in ends or token in controls.stop_tokens):
        return True
    if any(tuple(word) == then[-len(word) :] for word in controls.bad_words):
        return True
    size = controls.no_repeat_ngram
    return 0 < size < len(then) and then[-size:] in set(_ngrams(then[:-1], size))


def _ngrams(tokens: Tokens, size: int) -> Iterator[Tokens]:
    for start in range(len(tokens) - size + 1):
        yield tokens[start : start + size]


def _room(model: TableModel, request: Request, output: Sequence[int]) -> int:
    context = len(model.position_weights)
    return min(request.controls.max_new_tokens, context - len(request.prompt)) - len(output)


def _round(
    target: TableModel, draft: TableModel, request: Request, output: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """The tokens of one round; under laws that draft and draft length do not change, one token."""
    controls, place, room = request.controls, len(request.prompt) + len(output), _room(target, request, output)
    assert controls.seed is not None or controls.temperature == 0

    def laws(model: TableModel, tokens: Sequence[int]) -> Law:
        return law_at(model, request, [*output, *tokens], ends=ends, room=room - len(tokens))

    if controls.law_name == "greedy":
        return [argmax(laws(target, []))]
    if controls.law_name == "coupled":
        return [keyed_draw(laws(target, []), noise_keys(controls.seed), place)]
    proposals: list[int] = []
    q_rows = []
    for step in range(min(_draft_length(request), room - 1)):
        q_rows.append(laws(draft, proposals))
        proposals.append(inverse_cdf(q_rows[-1], _pair(controls.seed, Stream.DRAFT, place + step, step)))
    decide = {"residual": residual_step, "block": block_step}[controls.law_name]
    accepted, following = decide(
        [laws(target, proposals[:n]) for n in range(len(proposals) + 1)],
        q_rows,
        proposals,
        accept_uniforms=[uniforms(controls.seed, Stream.ACCEPT, place + n, n, 1)[0] for n in range(len(proposals))],
        draw=lambda law: inverse_cdf(law, _pair(controls.seed, Stream.DRAW, place, 0)),
    )
    return [*proposals[:accepted], following]


def _draft_length(request: Request) -> int:
    controls = request.controls
    if controls.draft == "none":
        return 0
    return DEFAULT_DRAFT_LENGTH if controls.draft_length is None else controls.draft_length


def _pair(seed: int, stream: Stream, position: int, index: int) -> tuple[float, float]:
    first, second = uniforms(seed, stream, position, index, 2)
    return first, second
