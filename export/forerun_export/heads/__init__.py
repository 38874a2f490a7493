"""Trained draft heads: one decoder layer that reads the target's own hidden states and proposes what comes next."""
