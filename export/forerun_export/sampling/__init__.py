"""Sampling graphs: from logits to accepted tokens without leaving the device."""

from forerun_export.sampling.saving import sampling_model
from forerun_export.sampling.stages import STAGE_GRAPHS, save_stage_graphs

SAMPLING_GRAPHS, save_sampling_graphs = STAGE_GRAPHS, save_stage_graphs

__all__ = ["SAMPLING_GRAPHS", "sampling_model", "save_sampling_graphs"]
