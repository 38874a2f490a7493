"""Stop strings, found in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string, whatever pieces the text comes in.

    The stop that starts first wins; of those that start at one place, the shortest, which is complete first.
    Text that may be the beginning of a stop is held (less than the longest stop). No stop may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len))  # so that min() over starts prefers the shortest
        self._held = ""
        self.matched: str | None = None
        """The stop that ended the text, once it is certain; after that nothing more is shown."""

    def push(self, text: str) -> str:
        """The text that may be shown now, "" once a stop has matched."""
        if self.matched is not None:
            return ""
        return self._settle(self._held + text, self._begin_of_unfinished(self._held + text))

    def flush(self) -> str:
        """What is held at the end of the text; sets `matched` if a longer stop was still being waited for."""
        return "" if self.matched is not None else self._settle(self._held, len(self._held))

    def _settle(self, text: str, unfinished: int) -> str:
        """Show `text` up to a stop that starts before or at `unfinished`, or else up to `unfinished`."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        start, stop = min(found, key=lambda match: match[0], default=(len(text) + 1, ""))
        if start <= unfinished:
            self.matched, self._held = stop, ""
            return text[:start]
        self._held = text[unfinished:]
        return text[:unfinished]

    def _begin_of_unfinished(self, text: str) -> int:
        """First index from which the rest of `text` is a proper beginning of a stop; its length if none."""
        longest = len(self._stops[-1]) if self._stops else 0
        for index in range(max(0, len(text) - longest + 1), len(text)):
            rest = text[index:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return index
        return len(text)
