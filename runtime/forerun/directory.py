"""An engine directory on disk: what its manifest promises, checked against the files that are there."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from forerun.errors import EngineError
from forerun.manifest import CHAT_TEMPLATE_NAME, MANIFEST_NAME, TOKENIZER_NAME, FileRecord, Manifest

_BLOCK_BYTES = 1 << 20
_MEND = 'build one with "forerun export"'


@dataclass(frozen=True)
class EngineDirectory:
    """An engine directory whose manifest has been read and whose files have the sizes that it records."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> "EngineDirectory":
        """Read the manifest of ``path`` and check all that is cheap to check (sizes, not hashes).

        Raises EngineError with one line that joins every violation: a file that is missing, truncated, not
        recorded or outside the directory; a draft of another vocabulary; a limit that is not positive.
        """
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise EngineError(f"engine directory {path} {what}; {_MEND}")
        if not (path / MANIFEST_NAME).is_file():
            raise EngineError(f"{path} has no {MANIFEST_NAME}, so it is not an engine directory; {_MEND}")
        directory = cls(path, Manifest.read(path / MANIFEST_NAME))
        if violations := list(directory._violations()):
            raise EngineError(f"{path}: {'; '.join(violations)}; export again")
        return directory

    def file(self, relative: str) -> Path:
        """The path of a file that the manifest names relative to the directory."""
        return self.path / relative

    def verify(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Hash every file; return the violations (none: the directory is as it was written).

        ``progress`` is called with the number of bytes hashed so far, of ``total_bytes``.
        """
        violations, done = [], 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done)

        for name, record in self.manifest.files.items():
            violation = self._file_violation(name, record) or self._hash_violation(name, record, advance)
            if violation is not None:
                violations.append(violation)
        return violations

    @property
    def total_bytes(self) -> int:
        """The size of all recorded files together."""
        return sum(record.bytes for record in self.manifest.files.values())

    def _violations(self) -> Iterator[str]:
        for name in self._used_files():
            if name not in self.manifest.files:
                yield f"{name} has no record in the manifest's files"
        for name, record in self.manifest.files.items():
            if violation := self._file_violation(name, record):
                yield violation
        yield from self._pair_violations()
        limits = self.manifest.limits
        for field in fields(limits):
            if (value := getattr(limits, field.name)) < 1:
                yield f"limits.{field.name} is {value}, it must be at least 1"

    def _used_files(self) -> list[str]:
        """Every file that a decoder reads, in the order of the manifest, none twice."""
        models = [model for model in (self.manifest.target, self.manifest.draft) if model is not None]
        names = [name for model in models for name in (model.graph, model.weights)]
        names += [*self.manifest.sampling.values(), TOKENIZER_NAME]
        if (self.path / CHAT_TEMPLATE_NAME).exists():
            names.append(CHAT_TEMPLATE_NAME)
        return list(dict.fromkeys(names))

    def _file_violation(self, name: str, record: FileRecord) -> str | None:
        if not self._is_inside(name):
            return f"{name} is not a plain relative path inside the engine directory"
        try:
            found = self.file(name).stat().st_size if self.file(name).is_file() else None
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found is None:
            return f"{name} is missing"
        if found != record.bytes:
            return f"{name} is {found} bytes long, the manifest says {record.bytes}"
        return None

    def _hash_violation(self, name: str, record: FileRecord, advance: Callable[[int], None]) -> str | None:
        digest = hashlib.sha256()
        try:
            with self.file(name).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    advance(len(block))
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if digest.hexdigest() != record.sha256:
            return f"{name} has another SHA-256 than the manifest records: its content has changed"
        return None

    def _is_inside(self, name: str) -> bool:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            return False
        return self.file(name).resolve().is_relative_to(self.path.resolve())

    def _pair_violations(self) -> Iterator[str]:
        target, draft = self.manifest.target, self.manifest.draft
        if target.vocabulary_sha256 != self.manifest.tokenizer.vocabulary_sha256:
            yield "the tokenizer's token map is not the target's"
        if draft is None:
            return
        sizes = draft.architecture.vocabulary_size, target.architecture.vocabulary_size
        if sizes[0] != sizes[1]:
            yield f"the draft's vocabulary has {sizes[0]} tokens, the target's {sizes[1]}"
        elif draft.vocabulary_sha256 != target.vocabulary_sha256:
            yield f"the draft's {sizes[0]} tokens are not the target's: same size, another token map"
