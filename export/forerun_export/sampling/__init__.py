"""Sampling graphs: from logits to accepted tokens without leaving the device."""

from forerun_export.sampling.saving import sampling_model
from forerun_export.sampling.stages import SAMPLING_GRAPHS, save_sampling_graphs

__all__ = ["SAMPLING_GRAPHS", "sampling_model", "save_sampling_graphs"]
