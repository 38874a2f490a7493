"""`--trace`: a line for each round, its tokens coloured by how they came about, and a summary line."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from forerun.decoder import Generation
from forerun.row import Chunk
from forerun.tokenizer import Tokenizer

STYLES = {
    "accepted": "green",
    "correction": "bold yellow",
    "bonus": "bold cyan",
    "rejected": "dim strike red",
}
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


class Trace:
    """Prints rounds as they come. Where there is no colour, the counts in front of each line still tell."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._rounds = 0
        legend = Text("round  kept   draft  ")
        for kind, style in STYLES.items():
            legend.append(f"{kind} ", style)
        console.print(legend, soft_wrap=True)

    def round(self, chunk: Chunk) -> None:
        """Print one round."""
        self._rounds += 1
        proposed = chunk.accepted + len(chunk.rejected)
        line = Text(f"{self._rounds:5}  {chunk.accepted:2}/{proposed:<2}  {chunk.draft or '':5}  ")
        for index, piece in enumerate(chunk.pieces):
            line.append(piece.translate(_VISIBLE), STYLES[_kind(chunk, index)])
        for token in chunk.rejected:
            line.append(self._tokenizer.decode([token], skip_special=False).translate(_VISIBLE), STYLES["rejected"])
        self._console.print(line, soft_wrap=True)

    def summary(self, generation: Generation) -> None:
        """Print what the whole run amounted to."""
        self._console.print(summary_line(generation), soft_wrap=True, style="bold")


def _kind(chunk: Chunk, index: int) -> str:
    if index < chunk.accepted:
        return "accepted"
    return "correction" if chunk.rejected else "bonus"


def summary_line(generation: Generation) -> str:
    """Counts, rates and times of a run in one line."""
    stats = generation.stats
    outside = 1 - stats.engine_s / stats.decode_s if stats.decode_s else 0.0
    return (
        f"{stats.emitted} tokens in {stats.rounds} rounds ({stats.tokens_per_round:.2f} a round), "
        f"{stats.accepted} of {stats.proposed} proposals accepted ({stats.acceptance_rate:.0%}), "
        f"{stats.corrections} corrections, {stats.bonuses} bonuses; {stats.tokens_per_s:.1f} tokens/s, "
        f"{outside:.1%} of it outside engines, {stats.host_bytes_per_round:.0f} bytes to the host a round; "
        f"law {stats.law}, draft {stats.draft}, seed {generation.seed}; ended by {generation.finish_reason}"
    )
