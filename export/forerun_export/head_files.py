"""A trained draft head, read for export."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun_export.heads.folder import RECORD_NAME, TENSORS_NAME, HeadFolder, HeadRecord, read_head


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A head's folder and where it lies."""

    path: Path
    folder: HeadFolder

    @classmethod
    def read(cls, path: Path) -> "TrainedHead":
        """Raises ExportError for a folder that holds no head, or a damaged one."""
        return cls(path, read_head(path))

    @property
    def record(self) -> HeadRecord:
        """What the head says of itself."""
        return self.folder.record

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Candidate tokens [N], ascending."""
        return self.folder.tokens

    @property
    def layer(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Weights of its decoder layer, by Hugging Face's names within a layer."""
        return {name: array.astype(np.float32) for name, array in self.folder.layer().items()}

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name`.weight."""
        return np.asarray(self.folder.tensors[f"{name}.weight"], np.float32)

    def sha256(self) -> str:
        """Of what decides about engines: tensors and record."""
        digest = hashlib.sha256()
        for name in (TENSORS_NAME, RECORD_NAME):
            digest.update((self.path / name).read_bytes())
        return digest.hexdigest()
