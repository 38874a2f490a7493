"""Sampling graphs: from logits to accepted tokens without leaving the device."""

from forerun_export.sampling.saving import SAMPLING_GRAPHS, sampling_model, save_sampling_graphs

__all__ = ["SAMPLING_GRAPHS", "sampling_model", "save_sampling_graphs"]
