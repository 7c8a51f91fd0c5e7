"""Recognize idioms of user models in their graphs: attention by interval, mixtures of experts, heads with a loss."""
