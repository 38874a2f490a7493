"""The process of one system: a JSON object a line in, one a line out.

    in   {"kind", "arguments"}                           once
    out  {"load_s", "load_peak_bytes"}                   loaded
    in   a task                                          any number of times
    out  {"output", "peak_bytes", "profile"}             decoded
    out  {"error"}                                       in place of either; what is wrong and what to do

It ends when its input does. Between tasks it waits in a read, which costs the others no time.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from forerun.errors import ForerunError
from forerun_export.bench.memory import peak_bytes, reset_peak
from forerun_export.bench.runs import Task
from forerun_export.bench.systems import System, how_to_install, open_system


def main() -> None:
    """Serve stdin on stdout, which libraries then cannot print to."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):  # no one waits for answers any more
        serve(sys.stdin, answers)


def serve(tasks: IO[str], answers: IO[str]) -> None:
    """Load the system that the first line names, then decode a task a line."""
    opened: list[System] = []
    for line in tasks:
        data = json.loads(line)
        answer = _or_error(partial(_decode, opened[0], data) if opened else partial(_load, opened, data))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(opened: list[System], data: Mapping[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    opened.append(open_system(data["kind"], data["arguments"]))
    loaded = {"load_s": time.perf_counter() - started, "load_peak_bytes": peak_bytes()}
    reset_peak()  # what loading takes at its worst says nothing about running
    return loaded


def _decode(system: System, data: Mapping[str, Any]) -> dict[str, Any]:
    output = system.decode(Task(**data))
    return {"output": output.to_json(), "peak_bytes": peak_bytes(), "profile": system.profile()}


def _or_error(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return step()
    except ForerunError as error:
        return {"error": str(error)}
    except ModuleNotFoundError as error:
        return {"error": f"needs the package {error.name}; {how_to_install(error.name or '')}"}
    except Exception as error:  # another library's: whatever it is, the other engines go on
        reason = " ".join(str(error).split())[:300]
        return {"error": f"{type(error).__name__}: {reason}; leave it out, or mend that"}


if __name__ == "__main__":
    main()
